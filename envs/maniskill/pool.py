"""Parallel ManiSkill environments in worker processes, one pipe each.

A step of one env takes milliseconds and its observation has at most a few hundred kilobytes:
sending it costs less than 1% of a step, so shared memory would gain nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.envs.maniskill.factory import Settings
from embodied.envs.maniskill.rows import Rows, joined
from embodied.envs.workers import Worker, receive_all, split


class Pool:
    """The methods of `Rows`, for `count` envs in `workers` processes."""

    def __init__(self, settings: Settings, count: int, workers: int) -> None:
        self.bounds = split(count, workers)
        given = [(settings, high - low) for low, high in self.bounds]
        self.parts = [Worker("ManiSkill", _make_rows, each, _arrays, _tensors) for each in given]
        receive_all(self.parts)

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
        self.parts[0].send("about")
        return self.parts[0].receive()

    def reset(self, seeds: Mapping[int, tuple[int, int] | None]) -> Tensors:
        asked = []
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            mine = {row - low: seed for row, seed in seeds.items() if low <= row < high}
            if mine:
                part.send("reset", mine)
                asked.append(part)
        return joined(receive_all(asked))

    def step(self, actions: NDArray[np.float32]) -> tuple[Tensors, Tensors]:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("step", actions[low:high])
        played = receive_all(self.parts)
        return joined([obs for obs, _ in played]), joined([told for _, told in played])

    def read(self) -> dict[str, NDArray[Any]]:
        for part in self.parts:
            part.send("read")
        states = receive_all(self.parts)
        return {key: np.concatenate([state[key] for state in states]) for key in states[0]}

    def write(self, state: Mapping[str, NDArray[Any]]) -> None:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("write", {key: value[low:high] for key, value in state.items()})
        receive_all(self.parts)

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return self._ask("draw", row, width, height)

    def tell(self, row: int) -> str:
        return self._ask("tell", row)

    def _ask(self, method: str, row: int, *more: Any) -> Any:
        number = next(n for n, (low, high) in enumerate(self.bounds) if low <= row < high)
        self.parts[number].send(method, row - self.bounds[number][0], *more)
        return self.parts[number].receive()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _make_rows(settings: Settings, count: int) -> Rows:
    """The envs of a worker process."""
    torch.set_num_threads(1)
    return Rows(settings, count)


class _Array:
    """Marks an array that was a tensor."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values


def _arrays(node: Any) -> Any:
    """A result in which tensors are arrays: torch would open a file for each tensor."""
    if isinstance(node, Tensor):
        return _Array(node.contiguous().numpy())
    if isinstance(node, dict):
        return {key: _arrays(part) for key, part in node.items()}
    return tuple(_arrays(part) for part in node) if isinstance(node, tuple) else node


def _tensors(node: Any) -> Any:
    if isinstance(node, _Array):
        return torch.from_numpy(node.values)
    if isinstance(node, dict):
        return {key: _tensors(part) for key, part in node.items()}
    return tuple(_tensors(part) for part in node) if isinstance(node, tuple) else node
