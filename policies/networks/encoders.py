"""Encoder: maps a dict of observations to one feature vector; includes the normalisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, hidden
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.policies.networks.image_encoders import ImageConfig, cameras
from embodied.policies.networks.pointnet import PointConfig, PointNet


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
        self.vectors = [k for k, v in seen.items() if _is_vector(v)]
        self.images = [name for name, leaf in seen.items() if leaf.is_image]
        self.names = [name for name, leaf in seen.items() if not leaf.is_text]
        flat = sum(seen[name].size for name in self.vectors)
        self.norm = MeanStdNormalizer(flat)
        self.normalized = [seen[name].is_normalized for name in self.vectors]
        if not seen:
            raise ConfigError(f"there is nothing to see: the observations are {sorted(obs)}")
        shapes = [seen[name].shape for name in self.images]
        made = cameras(shapes, images or ImageConfig())
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
            return _flat_vectors(obs[self.vectors[0]])
        return torch.cat([_flat_vectors(obs[name]) for name in self.vectors], 1)

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
        """The parts that `forward` concatenates, [n, size] for each of `sizes`: all vectors, each
        camera, all symbols, each point set."""
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
            widths = [_flat_vectors(values[name]).shape[1] for name in self.vectors]
            if any(self.normalized):
                given = torch.tensor(self.normalized).repeat_interleave(torch.tensor(widths))
                given = given.to(self.norm.mean.device)
                self.norm.mean[given] = 0.0
                self.norm.std[given] = 1.0
                self.norm.limit.fill_(torch.inf)
        for name, net in zip(self.sets, self.clouds, strict=True):
            cast(PointNet, net).fit(rows[f"obs/{name}"])


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


def _is_vector(leaf: Leaf) -> bool:
    return not (leaf.is_image or leaf.is_symbol or leaf.is_points or leaf.is_text)


def _flat_vectors(values: Tensor) -> Tensor:
    return _rows(values).float()


def _rows(values: Tensor) -> Tensor:
    # Not len: a traced export would fix the batch size.
    return values.reshape(values.shape[0], -1)
