"""Point sets: PointNet++ levels (Qi et al., 2017) and the sampling of a table's cloud.

level:  g_j = max_{i in kNN(c_j)} h([f_i, (p_i - c_j) / r]),   c: farthest points of p
back:   f_i = h([f_i, sum_{j in 3NN(p_i)} w_ij g_j]),          w_ij ~ 1 / |p_i - c_j|
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.point_cloud import Sampling, farthest, thinned

TABLE = 0.006  # m: points below belong to the table
LOW = (0.30, -0.33, -0.02)
HIGH = (0.74, 0.33, 0.25)
"""The box of a table's cloud, base frame, m."""
ON_TABLE = Sampling(128, 0.02, LOW, (*HIGH[:2], TABLE))
ABOVE = Sampling(384, 0.005, (*LOW[:2], TABLE), HIGH)
POINTS = ABOVE.points + ON_TABLE.points
SCALES = (0.006, 0.010, 0.030)  # m: of neighbourhoods


def sampled(points: Tensor) -> Tensor:
    """Clouds [B, POINTS, 3] of points [B, M, 3] (m, base frame): first ABOVE, then ON_TABLE."""
    return torch.cat([thinned(points, None, ABOVE), thinned(points, None, ON_TABLE)], 1)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, N, C] at `index` [B, ...] (int64): [B, ..., C]."""
    flat = index.flatten(1)[..., None].expand(-1, -1, values.shape[2])
    return values.gather(1, flat).unflatten(1, index.shape[1:])


def mlp(size: int, width: int) -> nn.Sequential:
    """Two layers with layer normalisation, of each point by itself."""
    return nn.Sequential(
        nn.Linear(size, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)
    )


@torch.no_grad()
def described(points: Tensor, middle: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Geometry around each of `points` [B, N, 3] (m): features [B, N, 24] and the axis into the
    surface [B, N, 3], a unit vector. Neighbours count by exp(-d^2 / 2 s^2) for the scales SCALES:
    the way to their mean and their second moments, of which the axis has the least, with the sign
    of the way to the mean of a wider neighbourhood."""
    above = points[:, : ABOVE.points] - middle
    points = points - middle
    square = (above[..., :, None] * above[..., None, :]).flatten(2)
    values = torch.cat([torch.ones_like(above[..., :1]), above, square], 2)
    gap = torch.cdist(points, above).square()
    ways: list[Tensor] = []
    moments: list[Tensor] = []
    for scale in SCALES:
        # Smaller weights would be denormal numbers, which are slow.
        weight = (gap / (-2 * scale**2)).clamp_(min=-30.0).exp_()
        total, mean, second = (weight @ values).split([1, 3, 9], 2)
        mean = mean / total
        spread = (second / total).unflatten(2, (3, 3)) - mean[..., None] * mean[..., None, :]
        trace = spread.diagonal(dim1=2, dim2=3).sum(2)[..., None, None]
        ways.append((mean - points) / scale)
        moments.append(spread / trace.clamp(min=1e-8))
    axes = [normal(each, ways[-1]) for each in moments[:-1]]
    flat = moments[1].flatten(2)[..., [0, 1, 2, 4, 5, 8]]
    return torch.cat([points / unit, *ways, *axes, flat], 2), axes[0]


def normal(moments: Tensor, side: Tensor) -> Tensor:
    """The axis [..., 3] of the least of the second moments [..., 3, 3] (of trace 1), turned to
    `side` [..., 3]: by squaring 1 - C, whose largest axis it is."""
    power = torch.eye(3, device=moments.device) - moments
    for _ in range(5):
        power = power @ power
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return functional.normalize((power @ side[..., None])[..., 0], dim=-1, eps=1e-6)


class Level(nn.Module):
    """One level up: `count` of the points ABOVE the table, each with what is around it."""

    def __init__(self, size: int, width: int, count: int, near: int, radius: float) -> None:
        super().__init__()
        self.count = count
        self.near = near
        self.radius = radius
        self.each = mlp(size + 3, width)

    def forward(self, points: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centres [B, count, 3], features [B, count, width] and which points the centres are
        [B, count], of points [B, N, 3], [B, N, size]; `near` neighbours count, as far as they are
        within `radius` (m)."""
        above = torch.arange(points.shape[1], device=points.device) < ABOVE.points
        which = farthest(points, above.expand(len(points), -1), self.count)
        centre = gather(points, which)
        gap, index = torch.cdist(centre, points).topk(self.near, largest=False)
        # Beyond the radius the nearest one, the centre itself, stands in: no effect on a maximum.
        index = torch.where(gap < self.radius, index, index[..., :1])
        offset = (gather(points, index) - centre[:, :, None]) / self.radius
        found = self.each(torch.cat([gather(features, index), offset], 3)).amax(2)
        return centre, found, which


class Back(nn.Module):
    """One level down: features of many points from those of few."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.each = mlp(size, width)

    def forward(self, points: Tensor, features: Tensor, centre: Tensor, above: Tensor) -> Tensor:
        gap, index = torch.cdist(points, centre).topk(3, largest=False)
        weight = 1 / gap.clamp(min=1e-4)
        weight = weight / weight.sum(2, keepdim=True)
        mixed = (gather(above, index) * weight[..., None]).sum(2)
        return self.each(torch.cat([features, mixed], 2))
