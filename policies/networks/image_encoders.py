"""Image encoders: CNNs from one image to a feature vector.

Two bodies: plain strided convolutions, or a small ResNet with group normalisation (He et al., 2016;
Wu and He, 2018), which is independent of the batch size. Three heads on the feature map h[c, y, x]:
flatten; spatial softmax, the expected position of each channel (Levine et al., 2016); or spatial
embeddings, sums over y and x of h[c] w[c, e] with learned w, e = 1 .. E (SERL; Luo et al., 2024).
Then one linear layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count
from embodied.core.build import ConfigError

GROUPS = 8


@dataclass(frozen=True)
class ImageConfig:
    """Settings of the image encoder.

    `head`: all values of the maps, a spatial softmax, or `embeddings` learned maps per channel.
    """

    channels: tuple[Count, ...] = (32, 64, 64, 64)  # of the convolutions, each halving the size
    features: Count = 64  # size of the output
    shared: bool = False  # one network for all cameras, whose images must have the same shape
    body: Literal["strided", "resnet"] = "strided"  # kind of the convolutions
    head: Literal["flat", "softmax", "embeddings"] = "flat"  # from maps to features
    embeddings: Count = 8  # learned maps per channel, for head=embeddings


class Camera(nn.Module):
    """Image encoder, uint8 [n, H, W, C] to [n, features]: a body, a head, and one linear layer.

    The feature map keeps its height and width up to the head, so positions are preserved.
    """

    def __init__(self, shape: tuple[int, ...], config: ImageConfig) -> None:
        super().__init__()
        height, width, channels = shape
        layers: list[nn.Module] = []
        for i, out in enumerate(config.channels):
            layers += (
                strided(channels, out)
                if config.body == "strided"
                else residual(channels, out, stem=i == 0)
            )
            channels = out
            height = -(-height // 2)
            width = -(-width // 2)
        self.convolve = nn.Sequential(*layers)
        head = HEADS[config.head](channels, height, width, config)
        self.project = nn.Sequential(
            head, nn.Linear(head.size, config.features), nn.LayerNorm(config.features), nn.Tanh()
        )
        self.size = config.features

    def forward(self, picture: Tensor) -> Tensor:
        pixels = picture.permute(0, 3, 1, 2).float() / 255 - 0.5
        return self.project(self.convolve(pixels))


def cameras(shapes: list[tuple[int, ...]], config: ImageConfig) -> list[Camera]:
    """One image encoder for each of `shapes`, or (`config.shared`) one for all."""
    if not config.shared or not shapes:
        return [Camera(shape, config) for shape in shapes]
    if len(set(shapes)) > 1:
        raise ConfigError(f"images.shared=true needs cameras of one shape, got {shapes}")
    return [Camera(shapes[0], config)] * len(shapes)


def strided(channels: int, out: int) -> list[nn.Module]:
    """A convolution of stride 2."""
    return [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.ReLU()]


def residual(channels: int, out: int, stem: bool) -> list[nn.Module]:
    """Layers that halve the size: a plain convolution (`stem`), or residual blocks."""
    if not stem:
        return [Residual(channels, out)]
    return [nn.Conv2d(channels, out, 3, stride=2, padding=1), norm(out), nn.ReLU()]


def norm(channels: int) -> nn.GroupNorm:
    """Group normalisation in up to GROUPS groups."""
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class Residual(nn.Module):
    """relu(short(h) + norm(conv(relu(norm(conv(h)))))), the first convolution of stride 2."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False),
            norm(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            norm(out),
        )
        self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride=2, bias=False), norm(out))

    def forward(self, h: Tensor) -> Tensor:
        return torch.relu(self.short(h) + self.body(h))


class Flat(nn.Flatten):
    """[n, C, H, W] to [n, C * H * W]."""

    def __init__(self, channels: int, height: int, width: int, config: ImageConfig) -> None:
        super().__init__()
        self.size = channels * height * width


class SpatialSoftmax(nn.Module):
    """Spatial softmax, [n, C, H, W] to [n, 2 C]: expected x and y of each channel in [-1, 1]."""

    places: Tensor

    def __init__(self, channels: int, height: int, width: int, config: ImageConfig) -> None:
        super().__init__()
        self.size = 2 * channels
        self.log_sharpness = nn.Parameter(torch.zeros(()))
        rows = torch.linspace(-1, 1, height)
        columns = torch.linspace(-1, 1, width)
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        places = torch.stack([x.flatten(), y.flatten()], 1)
        self.register_buffer("places", places, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        share = torch.softmax(self.log_sharpness.exp() * h.flatten(2), 2)
        return (share @ self.places).flatten(1)


class SpatialEmbeddings(nn.Module):
    """Spatial embeddings, [n, C, H, W] to [n, C * E]: each channel weighted by E learned maps."""

    def __init__(self, channels: int, height: int, width: int, config: ImageConfig) -> None:
        super().__init__()
        self.size = channels * config.embeddings
        scale = 1 / math.sqrt(height * width)
        self.maps = nn.Parameter(scale * torch.randn(channels, height * width, config.embeddings))

    def forward(self, h: Tensor) -> Tensor:
        # [n, C, 1, HW] @ [C, HW, E]
        return (h.flatten(2).unsqueeze(2) @ self.maps).flatten(1)


HEADS: dict[str, type[Flat] | type[SpatialSoftmax] | type[SpatialEmbeddings]] = {
    "flat": Flat,
    "softmax": SpatialSoftmax,
    "embeddings": SpatialEmbeddings,
}
