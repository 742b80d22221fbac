"""Encoder: maps a dict of observations to one feature vector; includes the normalisers.

Images: one of two bodies, plain strided convolutions, or a small ResNet with group normalisation
(He et al., 2016; Wu and He, 2018), which is independent of the batch size. Three heads on the
feature map h[c, y, x]: flatten; spatial softmax, the expected position of each channel (Levine et
al., 2016); or spatial embeddings, sums over y and x of h[c] w[c, e] with learned w, e = 1 .. E
(SERL; Luo et al., 2024). Then one linear layer.

Depth pictures (m) go through the same bodies as d / (1 + d), which tells near things apart best.

Point clouds: PointNet (Qi et al., 2017), permutation-invariant, in the variant of the 3D diffusion
policy (Ze et al., 2024): a shared MLP per point, max pooling over points, one linear layer.

    f({p_1 .. p_N}) = LayerNorm(W max_i h(p_i))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from embodied.core.bounds import Units
from embodied.core.build import ConfigError, resolve
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import MeanStdNormalizer

GROUPS = 8


@dataclass(frozen=True)
class ImageConfig:
    """Settings of the image encoder.

    `head`: all values of the maps, a spatial softmax, or `embeddings` learned maps per channel.
    """

    channels: tuple[Units, ...] = (32, 64, 64, 64)  # of the convolutions, each halving the size
    features: Units = 64  # size of the output
    shared: bool = False  # one network for all cameras, whose images must have the same shape
    body: Literal["strided", "resnet"] = "strided"  # kind of the convolutions
    head: Literal["flat", "softmax", "embeddings"] = "flat"  # from maps to features
    embeddings: Units = 8  # learned maps per channel, for head=embeddings


class Camera(nn.Module):
    """Image encoder, [n, H, W, C] uint8, or float32 in m where `depth`, to [n, features]: a body, a
    head, and one linear layer.

    The feature map keeps its height and width up to the head, so positions are preserved.
    """

    def __init__(self, leaf: Leaf, config: ImageConfig) -> None:
        super().__init__()
        self.depth = leaf.is_depth
        height, width, channels = leaf.shape
        layers: list[nn.Module] = []
        for i, out in enumerate(config.channels):
            layers += halving(channels, out, config.body, first=i == 0)
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
        values = picture.permute(0, 3, 1, 2).float()
        if self.depth:
            metres = values.clamp(min=0)
            unit = metres / (1 + metres)
        else:
            unit = values / 255
        return self.project(self.convolve(unit - 0.5))


def cameras(leaves: list[Leaf], config: ImageConfig) -> list[Camera]:
    """One image encoder for each of `leaves`, or (`config.shared`) one for all."""
    if not config.shared or not leaves:
        return [Camera(leaf, config) for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    if len({(leaf.shape, leaf.is_depth) for leaf in leaves}) > 1:
        raise ConfigError(f"images.shared=true needs cameras of one shape and kind, got {shapes}")
    return [Camera(leaves[0], config)] * len(leaves)


def halving(channels: int, out: int, body: str, first: bool) -> list[nn.Module]:
    """Layers that halve the size: a convolution, or in a ResNet after the first ones a block."""
    if body == "resnet" and not first:
        return [Residual(channels, out)]
    plain = nn.Conv2d(channels, out, 3, stride=2, padding=1)
    return [plain, norm(out), nn.ReLU()] if body == "resnet" else [plain, nn.ReLU()]


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


@dataclass(frozen=True)
class PointConfig:
    """Settings of the point cloud encoder."""

    channels: tuple[Units, ...] = (64, 128, 256)  # units of the layers that see one point
    features: Units = 64  # size of the output


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


class Encoder(nn.Module):
    """Encodes vectors (sorted by name, standardised), images (one CNN each), symbols (one-hot) and
    point sets (one PointNet each) to [n, size].

    `critic/*` and `privileged/*` observations are ignored unless `asymmetric`, text leaves always.
    """

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        super().__init__()
        seen = {k: v for k, v in sorted(obs.items()) if asymmetric or not hidden(k)}
        named = {name: leaf for name, leaf in seen.items() if leaf.is_symbol}
        self.vectors = [
            name
            for name, leaf in seen.items()
            if not (leaf.is_picture or leaf.is_symbol or leaf.is_points or leaf.is_text)
        ]
        self.images = [name for name, leaf in seen.items() if leaf.is_picture]
        self.names = [name for name, leaf in seen.items() if not leaf.is_text]
        flat = sum(seen[name].size for name in self.vectors)
        self.norm = MeanStdNormalizer(flat)
        self.normalized = [seen[name].is_normalized for name in self.vectors]
        if not seen:
            raise ConfigError(f"there is nothing to see: the observations are {sorted(obs)}")
        made = cameras([seen[name] for name in self.images], images or ImageConfig())
        self.cameras = nn.ModuleList(made)
        self.symbols = OneHot(named) if named else None
        self.sets = [name for name, leaf in seen.items() if leaf.is_points]
        nets = [PointNet(seen[name].shape[1], points or PointConfig()) for name in self.sets]
        self.clouds = nn.ModuleList(nets)
        self.sizes = [flat] if self.vectors else []
        self.sizes += [camera.size for camera in made]
        self.sizes += [self.symbols.size] if self.symbols is not None else []
        self.sizes += [net.size for net in nets]
        self.size = sum(self.sizes)

    def flat(self, obs: Tensors) -> Tensor:
        """The vector observations concatenated, [n, flat], in their own units."""
        if len(self.vectors) == 1:
            return _rows(obs[self.vectors[0]]).float()
        return torch.cat([_rows(obs[name]).float() for name in self.vectors], 1)

    def only_vectors(self) -> tuple[str, ...]:
        """The names of the vectors in order; ConfigError if there are other observations too."""
        if self.images or self.sets or self.symbols is not None:
            raise ConfigError(
                "this policy sees images, symbols or points, not only vectors of numbers"
            )
        return tuple(self.vectors)

    def forward(self, obs: Tensors) -> Tensor:
        parts = self.parts(obs)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def parts(self, obs: Tensors) -> list[Tensor]:
        """What `forward` concatenates, [n, size] each: vectors, cameras, symbols, point sets."""
        parts = [self.norm(self.flat(obs))] if self.vectors else []
        parts += [camera(obs[name]) for name, camera in zip(self.images, self.cameras, strict=True)]
        if self.symbols is not None:
            parts.append(self.symbols(obs))
        parts += [net(obs[name]) for name, net in zip(self.sets, self.clouds, strict=True)]
        return parts

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers from data with `obs/*` [N, ...]."""
        if self.vectors and not all(self.normalized):
            values = {name: rows[f"obs/{name}"] for name in self.vectors}
            self.norm.fit(self.flat(values))
            # Vectors that a wrapper normalised stay as they are.
            widths = [_rows(values[name]).shape[1] for name in self.vectors]
            if any(self.normalized):
                given = torch.tensor(self.normalized).repeat_interleave(torch.tensor(widths))
                given = given.to(self.norm.mean.device)
                self.norm.mean[given] = 0.0
                self.norm.std[given] = 1.0
                self.norm.limit.fill_(torch.inf)
        for name, net in zip(self.sets, self.clouds, strict=True):
            cast(PointNet, net).fit(rows[f"obs/{name}"])


def make_encoder(spec: Spec, config: Any) -> Encoder:
    """An Encoder, or its subclass `config.extractor`, which defines `forward` and sets `size`."""
    kind = Encoder if config.extractor is None else resolve(config.extractor, Encoder)
    return kind(spec.obs, config.images, points=config.points)


class OneHot(nn.Module):
    """One-hot encoding [n, size] of symbol observations, in the given order.

    One scatter for all: element i with value v sets column start[i] + v. A symbol above its leaf's
    `high` is an error of the environment and is not checked here (that would synchronise).
    """

    start: Tensor

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        super().__init__()
        self.names = list(leaves)
        count = torch.tensor([count for leaf in leaves.values() for count in leaf.symbols])
        self.size = int(count.sum())
        self.register_buffer("start", count.cumsum(0) - count, persistent=False)

    def forward(self, obs: Tensors) -> Tensor:
        parts = [_rows(obs[name]).long() for name in self.names]
        column = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)) + self.start
        zeros = torch.zeros(column.shape[0], self.size, device=column.device)
        return zeros.scatter_(1, column, 1.0)


def _rows(values: Tensor) -> Tensor:
    # Not len: a traced export would fix the batch size.
    return values.reshape(values.shape[0], -1)
