"""PointNet: a network from a set of points to one vector, independent of their order.

Qi et al. (2017), in the form of the 3D diffusion policy (Ze et al., 2024): the same small network
for each point, the largest value of each feature over all points, one linear layer.

    f({p_1 .. p_N}) = LayerNorm(W max_i h(p_i))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from embodied.nn.normalizers import MeanStdNormalizer


@dataclass(frozen=True)
class PointConfig:
    """`channels` of each point's layers, `features`: numbers that come out."""

    channels: tuple[int, ...] = (64, 128, 256)
    features: int = 64


class PointNet(nn.Module):
    """[n, N, 3 or 6] to [n, features]; N may differ from call to call."""

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
        """Set the normaliser (one for all points) from [n, N, C]."""
        self.norm.fit(points.flatten(0, 1))
