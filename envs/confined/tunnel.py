"""Planar tunnels with pyramids on the floor and the ceiling, and a box that clears both or not.

    height(x) = max_k h_k (1 - |x - x_k| / w_k),   at least 0, from the floor up or the ceiling down

Tunnels are [n, 2, K, 3]: of the K pyramids of the floor (0) and the ceiling (1) the place x (m),
the height h (m) and half the width w (m) of the base. Poses are x, z (m) of the box's middle and
its pitch (rad, positive: nose up, within +-60 degrees). The ceiling is checked as a floor: the box
is mirrored at the middle of the tunnel.

Both outlines have straight edges, so the gap between them is least at a corner of the box or at the
tip of a pyramid: a check of these is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIGH = 0.5  # m from the floor to the ceiling
SIZE = (0.42, 0.13)  # m: length and height of the box
RISE = (0.15, 0.35)  # m: least and greatest height of a pyramid
BASE = (0.2, 0.4)  # m: likewise the width of its base
BEND = 0.5  # m between the bends of the way that a tunnel leaves free
STRIDE = 0.04  # m between the poses on that way
CHORD = 0.2  # m to both sides over which the pitch on that way is the slope
CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]) / 2


def shares(x: Tensor, tunnel: Tensor) -> Tensor:
    """The height of each pyramid at x [n, m] as a share of its tip's: [n, 2, m, K]."""
    place, _, half = tunnel[:, :, None].unbind(4)  # [n, 2, 1, K]
    return (1 - (x[:, None, :, None] - place).abs() / half).clamp(min=0)


def heights(x: Tensor, tunnel: Tensor) -> Tensor:
    """How far the floor and the ceiling reach into the tunnel at x [n, m]: [n, 2, m] (m)."""
    return (shares(x, tunnel) * tunnel[:, :, None, :, 1]).amax(3)


def corners(pose: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Of boxes at poses [n, m, 3] the x of each corner [n, 4 m], and its distance from the flat
    floor and ceiling [n, 2, 4 m] (m)."""
    x, z, pitch = pose.unbind(2)
    cos, sin = pitch.cos()[..., None], pitch.sin()[..., None]
    ahead, up = (CORNERS.to(pose) * (pose.new_tensor(SIZE) + 2 * margin)).unbind(1)
    across = x[..., None] + cos * ahead - sin * up
    above = z[..., None] + sin * ahead + cos * up
    return across.flatten(1), torch.stack([above, HIGH - above], 1).flatten(2)


def over_tips(pose: Tensor, tunnel: Tensor, margin: float) -> Tensor:
    """The distance of boxes at poses [n, m, 3] from the flat floor and ceiling on the vertical line
    through each tip: [n, 2, m, K] (m); infinite where that line misses the box."""
    half = pose.new_tensor(SIZE) / 2 + margin
    x, z, pitch = pose.unbind(2)
    middle = torch.stack([z, HIGH - z], 1)[..., None]
    tilt = torch.stack([pitch.sin(), -pitch.sin()], 1)[..., None]
    cos = pitch.cos()[:, None, :, None]
    offset = tunnel[:, :, None, :, 0] - x[:, None, :, None]
    # The line enters the box through its lower side or, where it is tilted, through its low end.
    side = (offset * tilt - half[1]) / cos
    end = -(offset * cos * tilt.sign() + half[0]) / tilt.abs().clamp(min=1e-6)
    edge = torch.where(tilt.abs() > 1e-6, torch.maximum(side, end), side)
    beside = offset.abs() > half[0] * cos + half[1] * tilt.abs()
    return torch.where(beside, torch.inf, middle + edge)


def gaps(pose: Tensor, tunnel: Tensor, margin: float = 0.0) -> Tensor:
    """Least vertical gaps [n, 2, m] (m) between boxes at poses [n, m, 3] and each map; below 0
    where they overlap. `margin` (m) widens the box to all sides."""
    x, above = corners(pose, margin)
    at_corners = (above - heights(x, tunnel)).unflatten(2, (-1, 4)).amin(3)
    at_tips = over_tips(pose, tunnel, margin) - tunnel[:, :, None, :, 1]
    return torch.minimum(at_corners, at_tips.amin(3))


def room(pose: Tensor, tunnel: Tensor, margin: float = 0.0) -> Tensor:
    """The smaller of both `gaps`, [n, m]."""
    return gaps(pose, tunnel, margin).amin(1)


def tallest(pose: Tensor, tunnel: Tensor, margin: float) -> Tensor:
    """The greatest heights [n, 2, K] (m) of the pyramids at which all boxes at poses [n, m, 3]
    clear them."""
    x, above = corners(pose, margin)
    at_corners = (above[..., None] / shares(x, tunnel)).amin(2)
    return torch.minimum(at_corners, over_tips(pose, tunnel, margin).amin(2)).clamp(min=0)


def drawn(lots: Tensor, first: float, length: float, count: int, margin: float) -> Tensor:
    """Tunnels [n, 2, count, 3] from uniform numbers [n, 6 count + bends]: pyramids are evenly
    spread from `first` over `length` m, and are as high as the way allows that is drawn with them.
    """
    pyramids, way = lots.tensor_split([6 * count], 1)
    place, rise, base = pyramids.view(-1, 2, count, 3).unbind(3)
    place = first + length / count * (torch.arange(count, device=lots.device) + place)
    rise = RISE[0] + (RISE[1] - RISE[0]) * rise
    half = (BASE[0] + (BASE[1] - BASE[0]) * base) / 2
    tunnel = torch.stack([place, rise, half], 3)
    poses = way_through(way, margin)
    return torch.stack([place, torch.minimum(rise, tallest(poses, tunnel, margin)), half], 3)


def way_through(lots: Tensor, margin: float) -> Tensor:
    """Poses [n, m, 3] on a way that bends at x = 0, BEND, 2 BEND, ... m, where its heights are
    those that `lots` [n, k] choose, from the lowest (0) to the highest (1)."""
    x = torch.arange(0, (lots.shape[1] - 1) * BEND, STRIDE, device=lots.device)
    least = SIZE[1] / 2 + margin
    level = least + (HIGH - 2 * least) * lots

    def z(x: Tensor) -> Tensor:
        at = (x / BEND).clamp(0, lots.shape[1] - 1.001)
        before = at.long()
        return torch.lerp(level[:, before], level[:, before + 1], at - before)

    pitch = torch.atan2(z(x + CHORD) - z(x - CHORD), torch.tensor(2 * CHORD))
    half = SIZE[0] / 2 * pitch.sin().abs() + SIZE[1] / 2 * pitch.cos() + 1.5 * margin
    return torch.stack([x.expand_as(pitch), z(x).maximum(half).minimum(HIGH - half), pitch], 2)
