"""Planner of waypoints for a box in a tunnel: the shortest way over a lattice of poses.

    D(q) = min over neighbours q' of D(q') + cost(q, q'),     D = distance from the goal close to it

Poses q = (x, z, pitch) of the lattice are nodes if the box, widened by a margin, clears both maps
there. A move ahead costs its 0.1 m, with any change of z and pitch by a node; one at the same x
0.02 m. The local planner of confined-space locomotion (Xu et al., 2024) compares such poses by
their straight distance from the goal: in a planar tunnel it ends in front of an obstacle, where the
robot of the paper passes at the side of it. The waypoint is the farthest of the next nodes on the
way that is reached in a straight line.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from embodied.envs.confined.tunnel import HIGH, gaps, room

STEP = (0.1, 0.02, math.radians(8))  # m, m and rad between nodes
FIRST = (-0.2, 0.08, math.radians(-40))  # of the nodes
HEIGHTS = round((HIGH - 2 * FIRST[1]) / STEP[1]) + 1
PITCHES = round(-2 * FIRST[2] / STEP[2]) + 1
BESIDE = 6  # moves in a row at the same x
ALONG = 6  # nodes on the way, of which the waypoint is taken
NARROW = 0.02  # m of gap beyond the margin, below which a way counts three times
NONE = 100.0  # m: there is no way
AROUND = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)  # [27, 3], itself in the middle


def lattice(length: float) -> Tensor:
    """The poses [X, Z, P, 3] of the nodes in a tunnel of `length` m."""
    counts = (math.ceil((length - 2 * FIRST[0]) / STEP[0]), HEIGHTS, PITCHES)
    parts = [
        first + step * torch.arange(count)
        for first, step, count in zip(FIRST, STEP, counts, strict=True)
    ]
    return torch.cartesian_prod(*parts).view(*counts, 3)


def ways(nodes: Tensor, goal: Tensor, tunnel: Tensor, margin: float) -> Tensor:
    """The lengths [n, X, Z, P] (m) of the shortest ways from nodes to goals [n, 3]; NONE where
    there is none. Ways never lead back, so one pass over x from the end finds them."""
    # A gap changes by as much as z does: one height tells those of all.
    low = nodes[:, :1].flatten(0, 2).expand(len(goal), -1, -1)
    floor, ceiling = gaps(low, tunnel, margin).unflatten(2, (len(nodes), 1, -1)).unbind(1)
    up = STEP[1] * torch.arange(HEIGHTS)[:, None]
    gap = torch.minimum(floor + up, ceiling - up)
    narrow = torch.where(gap < NARROW, 3.0, 1.0)
    away = (nodes[..., :2] - goal[:, None, None, None, :2]).norm(dim=4)
    field = torch.where((gap > 0) & (away < STEP[0]), away, NONE)
    for x in range(len(nodes) - 1, -1, -1):
        here = field[:, x]
        after = field[:, min(x + 1, len(nodes) - 1)]
        for move in range(1 + BESIDE):
            cost = STEP[1] if move else STEP[0]
            longer = cost * narrow[:, x] - max_pool2d(-(here if move else after), 3, 1, 1)
            here = torch.where(gap[:, x] > 0, torch.minimum(here, longer), NONE)
        field[:, x] = here
    return field


def clear(pose: Tensor, target: Tensor, tunnel: Tensor, margin: float, checks: int = 6) -> Tensor:
    """Whether the straight lines from `pose` [n, 3] to `target` [n, m, 3] keep `margin` (m) from
    both maps at `checks` places: [n, m]."""
    share = torch.arange(1, checks + 1)[:, None] / checks
    between = pose[:, None, None] + share * (target - pose[:, None])[:, :, None]
    gap = room(between.flatten(1, 2), tunnel, margin)
    return (gap > 0).unflatten(1, (-1, checks)).all(2)


def planned(
    nodes: Tensor, field: Tensor, pose: Tensor, tunnel: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Waypoints [n, 3] for bodies at `pose` [n, 3], and whether there is a way [n]. `field`
    [n, X, Z, P]: what `ways` returned."""
    row = torch.arange(len(pose))
    most = torch.tensor(nodes.shape[:3]) - 1
    at = ((pose - torch.tensor(FIRST)) / torch.tensor(STEP)).round().long()

    def around(at: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [n, 27, 3] of the nodes around nodes [n, 3], and their ways' lengths [n, 27]."""
        near = torch.minimum((at[:, None] + AROUND).clamp(min=0), most)
        return near, field[row[:, None], *near.unbind(2)]

    # Of the nodes around the body that it can reach, the one nearest to the goal.
    near, length = around(at)
    reach = clear(pose, nodes[*near.unbind(2)], tunnel, 0.0, 2)
    length, first = torch.where(reach, length, NONE).min(1)
    at = near[row, first]
    on = [at]
    for _ in range(ALONG - 1):
        near, below = around(at)
        at = near[row, below.argmin(1)]
        on.append(at)
    way = nodes[*torch.stack(on, 1).unbind(2)]  # [n, ALONG, 3]
    direct = clear(pose, way, tunnel, margin)
    direct[:, 0] = True
    last = ALONG - 1 - direct.flip(1).long().argmax(1)
    return way[row, last], length < NONE
