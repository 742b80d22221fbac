"""Small worlds with arithmetic that can be done by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Row i starts at i * 100; `ends[i]` (counted in steps) and whether that is a termination."""

    num_envs: int = 2
    ends: tuple[int, ...] = (3, 5)
    terminates: tuple[bool, ...] = (True, False)


class Counter(VecEnv):
    """Observation: a number that grows by one a step; reward: that number before the step."""

    def __init__(self, config: Config) -> None:
        self.num_envs = config.num_envs
        pick = torch.arange(config.num_envs) % len(config.ends)
        self.ends = torch.tensor(config.ends)[pick]
        self.terminates = torch.tensor(config.terminates)[pick]
        act = Leaf((1,), low=-1.0, high=1.0)
        self.spec = Spec({"state": Leaf((1,))}, act, dt=0.1, text="count")
        self.start = 100.0 * torch.arange(config.num_envs)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    def _obs(self) -> Tensors:
        return {"state": (self.start + self.age)[:, None]}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.age = self.age * 0 if mask is None else self.age * ~mask
        return self._obs()

    def step(self, action: Tensor) -> Step:
        reward = (self.start + self.age).float()
        self.age = self.age + 1
        following = self._obs()
        ended = self.age >= self.ends
        self.age = self.age * ~ended
        over = ended & self.terminates
        return Step(self._obs(), following, reward, over, ended & ~over, {"success": over})

    def get_state(self) -> Tensors:
        return {"age": self.age.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.age = state["age"].clone()
        return self._obs()


class Reach(VecEnv):
    """A point on a plane is pushed towards the origin; reward minus its distance, 20 steps."""

    def __init__(self, num_envs: int = 4) -> None:
        self.num_envs = num_envs
        act = Leaf((2,), low=-1.0, high=1.0)
        self.spec = Spec({"state": Leaf((2,))}, act, dt=0.1, text="go to the origin")
        self.generators = [torch.Generator().manual_seed(i) for i in range(num_envs)]
        self.place = torch.zeros(num_envs, 2)
        self.age = torch.zeros(num_envs, dtype=torch.int64)

    def _draw(self, row: int) -> Tensor:
        return torch.rand(2, generator=self.generators[row]) * 2 - 1

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        if seed is not None:
            for row in rows.nonzero().flatten().tolist():
                self.generators[row].manual_seed(seed * 1000 + row)
        self._begin(rows)
        return {"state": self.place}

    def _begin(self, rows: Tensor) -> None:
        self.place, self.age = self.place.clone(), self.age * ~rows
        for row in rows.nonzero().flatten().tolist():
            self.place[row] = self._draw(row)

    def step(self, action: Tensor) -> Step:
        self.place = (self.place + 0.2 * action.clamp(-1, 1)).clamp(-2, 2)
        self.age = self.age + 1
        following, distance = {"state": self.place}, self.place.norm(dim=1)
        ended = self.age >= 20
        if ended.any():
            self._begin(ended)
        never = torch.zeros_like(ended)
        log = {"success": distance < 0.1}
        return Step({"state": self.place}, following, -distance, never, ended, log)

    def get_state(self) -> Tensors:
        states = torch.stack([g.get_state() for g in self.generators])
        return {"place": self.place.clone(), "age": self.age.clone(), "generator": states}

    def set_state(self, state: Tensors) -> Tensors:
        self.place, self.age = state["place"].clone(), state["age"].clone()
        for generator, words in zip(self.generators, state["generator"], strict=True):
            generator.set_state(words.clone())
        return {"state": self.place}
