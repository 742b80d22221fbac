"""TorchTeacher: base class of teachers with neural networks.

Weights are initialised from the teacher's own generator (torch's global one is not used), and
networks and optimisers are saved with the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.nn.optim import Optimizer
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats


def mlp(
    sizes: Sequence[int], random: np.random.Generator, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A multilayer perceptron with layer `sizes`; weights are sampled with `random`."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [linear(inner, outer, random), activation()]
    return nn.Sequential(*layers[:-1])


def linear(inner: int, outer: int, random: np.random.Generator, scale: float = 1.0) -> nn.Linear:
    """A linear layer with torch's default initialisation, uniform in +-scale / sqrt(inner)."""
    layer = nn.Linear(inner, outer, device="meta").to_empty(device="cpu")  # no random numbers used
    edge = scale / math.sqrt(inner)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias):
            parameter.copy_(torch.from_numpy(random.uniform(-edge, edge, tuple(parameter.shape))))
    return layer


def gru(inner: int, outer: int, random: np.random.Generator, both_ways: bool = False) -> nn.GRU:
    """A GRU over [n, T, inner] with torch's default initialisation."""
    cell = nn.GRU(inner, outer, batch_first=True, bidirectional=both_ways, device="meta")
    cell, edge = cell.to_empty(device="cpu"), 1 / math.sqrt(outer)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.from_numpy(random.uniform(-edge, edge, tuple(parameter.shape))))
    return cell


def embedding(words: int, size: int, random: np.random.Generator) -> nn.Embedding:
    """An embedding table with standard normal weights."""
    layer = nn.Embedding(words, size, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(random.standard_normal((words, size))))
    return layer


class TorchTeacher(teacher.Teacher):
    """Saves and restores `modules` and `optimizers`, by name, with the teacher."""

    remembered = ("modules", "optimizers")
    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal(shape)).float()

    def uniform(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.random(shape)).float()

    def some(self, rows: Tensor, n: int) -> Tensor:
        """`n` of `rows`, sampled with replacement."""
        return rows[torch.from_numpy(self.random.integers(len(rows), size=n))]


def tensor(array: Floats | list[Any]) -> Tensor:
    return torch.tensor(np.asarray(array), dtype=torch.float32)


def points(values: Tensor) -> Floats:
    """Network outputs as points [n, d] of the unit cube."""
    return values.detach().double().numpy()
