"""PointNet: permutation-invariant encoder of a point cloud (Qi et al., 2017).

The variant of the 3D diffusion policy (Ze et al., 2024): a shared MLP per point, max pooling over
points, one linear layer.

    f({p_1 .. p_N}) = LayerNorm(W max_i h(p_i))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from embodied.core.bounds import Count
from embodied.nn.normalizers import MeanStdNormalizer


@dataclass(frozen=True)
class PointConfig:
    """Settings of the point cloud encoder."""

    channels: tuple[Count, ...] = (64, 128, 256)  # units of the layers that see one point
    features: Count = 64  # size of the output


class PointNet(nn.Module):
    """Point-cloud encoder, [n, N, 3 or 6] to [n, features]; N may vary between calls."""

    def __init__(self, channels: int, config: PointConfig) -> None:
        super().__init__()
        self.norm = MeanStdNormalizer(channels)
        layers: list[nn.Module] = []
        for out in config.channels:
            layers += [nn.Linear(channels, out), nn.LayerNorm(out), nn.ReLU()]
            channels = out
        self.each = nn.Sequential(*layers)
        self.project = nn.Sequential(
            nn.Linear(channels, config.features), nn.LayerNorm(config.features)
        )
        self.size = config.features

    def forward(self, points: Tensor) -> Tensor:
        return self.project(self.each(self.norm(points)).amax(1))

    def fit(self, points: Tensor) -> None:
        """Set the normaliser (shared by all points) from `points` [n, N, C]."""
        self.norm.fit(points.flatten(0, 1))
