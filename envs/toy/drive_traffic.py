"""Obstacles from the view of Drive's car: the nearest, conflicts, the speed of a careful driver."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.envs.toy.drive_road import Obstacles

CONTACT = 1.3  # m between centres
SOON = 1.0  # s to contact below which there is a conflict
BEHIND = -3.0  # m along the route; nearer obstacles are seen
FAR = 40.0  # likewise, farther ones are not
WIDE = CONTACT  # m to the side within which an obstacle is in the way
STOP = 2.0  # m before an obstacle in the way: standing
SLOW = 10.0  # m before it: slowing down
CORNER = 4.0  # m/s^2 of lateral acceleration in a bend


def turned(vectors: Tensor, yaw: Tensor) -> Tensor:
    """Vectors [n, M, 2] in the frames of cars with `yaw` [n]."""
    x, y = vectors.unbind(2)
    cos, sin = yaw.cos()[:, None], yaw.sin()[:, None]
    return torch.stack([x * cos + y * sin, y * cos - x * sin], 2)


def _velocity(car: Tensor) -> Tensor:
    return car[:, 3, None] * torch.stack([car[:, 2].cos(), car[:, 2].sin()], 1)


def nearest(car: Tensor, station: Tensor, obstacles: Obstacles, count: int) -> Tensor:
    """Relative positions and velocities of the `count` next obstacles along the route, in the car's
    frame, [n, 4 count]; one that is out of sight stands `FAR` ahead."""
    gap = obstacles.station - station[:, None]
    key = torch.where((gap > BEHIND) & (gap < FAR), gap, torch.inf)
    first, index = key.topk(count, 1, largest=False)
    hidden = first.isinf()[..., None]
    index = index[..., None].expand(-1, -1, 2)
    away = obstacles.place.gather(1, index) - car[:, None, :2]
    speed = obstacles.velocity.gather(1, index) - _velocity(car)[:, None]
    away = torch.where(hidden, torch.tensor([FAR, 0.0]), turned(away, car[:, 2]))
    speed = torch.where(hidden, 0.0, turned(speed, car[:, 2]))
    return torch.cat([away.flatten(1), speed.flatten(1)], 1)


def conflict(car: Tensor, obstacles: Obstacles) -> Tensor:
    """Whether at constant velocities the car touches an obstacle within `SOON` seconds, [n]."""
    away = obstacles.place - car[:, None, :2]
    motion = obstacles.velocity - _velocity(car)[:, None]
    square = motion.square().sum(2).clamp(min=1e-6)
    closing = -(away * motion).sum(2)
    # |away + t motion|^2 = CONTACT^2 has its first root below SOON.
    root = closing.square() - square * (away.square().sum(2) - CONTACT**2)
    time = (closing - root.clamp(min=0).sqrt()) / square
    return ((root >= 0) & (closing > 0) & (time < SOON)).any(1)


def desired_speed(obstacles: Obstacles, place: Tensor, limit: Tensor, bend: Tensor) -> Tensor:
    """The speed [n] of a careful driver: the limit, less in a bend (curvature `bend` [n]) and less
    the closer an obstacle in the way is. `place`: station and offset of the car."""
    gap = obstacles.station - place[:, :1]
    beside = (obstacles.offset - place[:, 1:2]).abs() > WIDE
    free = torch.where((gap < 0) | beside, torch.inf, gap).amin(1)
    share = ((free - STOP) / (SLOW - STOP)).clamp(0, 1)
    return torch.minimum(limit, (CORNER / bend.abs().clamp(min=1e-3)).sqrt()) * share
