"""BatchedEnv: base class of environments that step all parallel envs at once in torch or numpy.

It has what they share: resets of some envs, the end of a step, the saved state, maps for people.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors


class Generators:
    """A `torch.Generator` per env."""

    def __init__(self, seed: int, rows: int) -> None:
        self.each = [torch.Generator() for _ in range(rows)]
        self.seed(seed, torch.arange(rows))

    @property
    def state(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self.each])

    @state.setter
    def state(self, words: Tensor) -> None:
        for generator, own in zip(self.each, words, strict=True):
            generator.set_state(own.clone())

    def seed(self, seed: int, rows: Tensor) -> None:
        for row in rows.tolist():
            self.each[row].manual_seed(seed * 1_000_003 + row)

    def uniform(self, count: int, row: int) -> Tensor:
        """The next numbers [count] in [0, 1) of env `row`."""
        return torch.rand(count, generator=self.each[row])


class BatchedEnv(VecEnv):
    """B parallel envs whose state is arrays in attributes; `obs` are the present observations.

    `kept`: the leaves of the saved state, each with the attribute (`streams.state`) that holds it,
    [B, ...], or [k, B] for those of `columns`. `keeps_obs`: the observations are saved too; else
    they follow from the rest.
    """

    kept: ClassVar[Mapping[str, str]]
    columns: ClassVar[tuple[str, ...]] = ()
    keeps_obs: ClassVar[bool] = False
    name: str
    streams: Any  # a random generator per env: a `RowRng` or `Generators`
    obs: Tensors | None = None

    @abstractmethod
    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        """Start episodes in `rows` [n] (int64); `task` [B, D] fixes their task vectors."""

    @abstractmethod
    def observe(self, rows: Tensor) -> Tensors:
        """The observations of `rows` [n]."""

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            task = self.checked_task(task)
        every = torch.arange(self.num_envs, device=self.device)
        rows = every if mask is None else every[mask.to(self.device)]
        if self.obs is None and len(rows) < self.num_envs:
            raise ValueError(f"{self.name}: the first reset must reset all envs (mask=None)")
        if seed is not None:
            self.streams.seed(seed, rows)
        self.begin(rows, task)
        self.obs = self.begun(self.obs, rows)
        return self.obs

    def checked_task(self, task: Tensor) -> Tensor:
        """`task` on this device. ValueError if the environment has no such task vectors."""
        leaf = self.spec.task
        if leaf is None:
            raise ValueError(f"{self.name} has no task vector; call reset without `task`")
        expected = (self.num_envs, leaf.size)
        if tuple(task.shape) != expected:
            raise ValueError(f"{self.name}: task is {tuple(task.shape)}, expected {expected}")
        return task.detach().to(self.device)

    def finish(
        self,
        following: Tensors,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        log: Tensors,
    ) -> Step:
        """The result of a step that led to the observations `following`; ended envs begin again."""
        self.obs = following
        ended = terminated | truncated
        rows = ended.nonzero().flatten()  # the one wait of a step, on a GPU
        if len(rows):
            self._notify_before_reset(ended)
            self.begin(rows)
            self.obs = self.begun(following, rows)
        return Step(self.obs, following, reward, terminated, truncated, log)

    def begun(self, obs: Tensors | None, rows: Tensor) -> Tensors:
        """A copy of `obs` in which `rows` [n] are at the start of an episode."""
        fresh = self.observe(rows)
        if obs is None:
            return fresh
        return {key: value.index_copy(0, rows, fresh[key]) for key, value in obs.items()}

    def get_state(self) -> Tensors:
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before get_state()")
        state: Tensors = {}
        for leaf, attribute in self.kept.items():
            value = torch.as_tensor(attrgetter(attribute)(self))
            state[leaf] = turned(value) if leaf in self.columns else value.clone()
        if self.keeps_obs:
            state |= {f"obs/{name}": value.clone() for name, value in self.obs.items()}
        return state

    def set_state(self, state: Tensors) -> Tensors:
        for leaf, attribute in self.kept.items():
            value = state[leaf].to(self.device)
            value = turned(value) if leaf in self.columns else value.clone()
            path, _, last = attribute.rpartition(".")
            owner: Any = attrgetter(path)(self) if path else self
            is_array = isinstance(getattr(owner, last), np.ndarray)
            setattr(owner, last, value.numpy() if is_array else value)
        if self.keeps_obs:
            self.obs = {
                name: state[f"obs/{name}"].to(self.device).clone() for name in self.spec.obs
            }
        else:
            self.obs = self.observe(torch.arange(self.num_envs, device=self.device))
        return self.obs


def turned(values: Tensor) -> Tensor:
    """[B, k] as a copy [k, B] without gaps, or back: sums and products round by layout."""
    return values.T.clone(memory_format=torch.contiguous_format)


def turned_by(vector: Tensor, angle: Tensor) -> Tensor:
    """Vectors [..., 2] turned to the left by `angle` [...] (rad)."""
    cos, sin = angle.cos(), angle.sin()
    x, y = vector.unbind(-1)
    return torch.stack([x * cos - y * sin, x * sin + y * cos], -1)


Colour = Sequence[int]


def pixel_grid(width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> Tensor:
    """The places [height, width, 2] of a map's pixels, over the ranges `x` and `y` (upwards)."""
    lines = torch.linspace(y[1], y[0], height)
    return torch.stack(torch.meshgrid(torch.linspace(*x, width), lines, indexing="xy"), 2)


def paint(picture: Tensor, where: Tensor, colour: Colour) -> None:
    """Paint the pixels `where` [height, width] (bool) of uint8 [height, width, 3]."""
    picture[where] = torch.tensor(colour, dtype=torch.uint8)


def paint_discs(
    picture: Tensor, grid: Tensor, discs: Iterable[tuple[Tensor, float, Colour]]
) -> Tensor:
    """Paint discs (place, radius, colour) on a map whose pixels are at `grid`."""
    for place, radius, colour in discs:
        paint(picture, (grid - place).norm(dim=2) < radius, colour)
    return picture
