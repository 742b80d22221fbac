"""The picture of one of Drive's parallel envs: a map around its car."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 12.0  # m from the middle of the map to its upper edge
GROUND = (150, 165, 140)
SHOULDER = (200, 200, 195)
TARMAC = (235, 235, 230)
OBSTACLE = (230, 140, 40)
CAR = (200, 60, 50)
NOSE = (120, 30, 25)


def picture(
    car: Tensor,
    obstacles: Tensor,
    route: Tensor,
    widths: tuple[float, float],
    size: tuple[int, int],
) -> Tensor:
    """An image uint8 [height, width, 3] around `car` (x, y, yaw, ...), north up; `widths`: of the
    lane and the road on each side of the `route` [N, 2]."""
    width, height = size
    y, x = torch.meshgrid(
        torch.linspace(HALF, -HALF, height),
        torch.linspace(-HALF, HALF, width) * width / height,
        indexing="ij",
    )
    grid = torch.stack([x, y], 2) + car[:2]
    near = route[(route - car[:2]).abs().amax(1) < 2 * HALF * max(width / height, 1)]
    shown = torch.tensor(GROUND, dtype=torch.uint8).repeat(height, width, 1)
    if len(near):
        away = torch.cdist(grid.view(-1, 2), near).amin(1).view(height, width)
        shown[away < widths[1]] = torch.tensor(SHOULDER, dtype=torch.uint8)
        shown[away < widths[0]] = torch.tensor(TARMAC, dtype=torch.uint8)
    nose = car[:2] + 0.6 * torch.stack([car[2].cos(), car[2].sin()])
    discs = [(place, 0.5, OBSTACLE) for place in obstacles]
    for place, radius, colour in (*discs, (car[:2], 0.8, CAR), (nose, 0.3, NOSE)):
        shown[(grid - place).norm(dim=2) < radius] = torch.tensor(colour, dtype=torch.uint8)
    return shown
