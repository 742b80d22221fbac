"""An environment: push a point to the origin."""

from dataclasses import dataclass

import torch

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec


@dataclass(frozen=True)
class Config:
    num_envs: int = 8
    horizon: int = 20


class Plane(VecEnv):
    def __init__(self, config: Config) -> None:
        self.num_envs, self.horizon = config.num_envs, config.horizon
        act = Leaf((2,), low=-1.0, high=1.0, names=("x", "y"))
        task = Leaf((2,), low=0.0, high=1.0, names=("start_x", "start_y"))
        leaf = Leaf((2,), unit="m", names=("tool_x", "tool_y"))
        self.spec = Spec({"state": leaf}, act, dt=0.1, task=task, text="go to the origin")
        self.generators = [torch.Generator() for _ in range(self.num_envs)]
        self.place = torch.zeros(self.num_envs, 2)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)

    def reset(self, seed=None, task=None, mask=None):
        rows = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        self.place = self.place.clone()
        for row in rows:
            if seed is not None:
                self.generators[row].manual_seed(seed * 10_007 + row)
            self.place[row] = self._start(row) if task is None else task[row] * 2 - 1
            self.age[row] = 0
        return {"state": self.place}

    def _start(self, row):
        return torch.rand(2, generator=self.generators[row]) * 2 - 1

    def step(self, action):
        after = self.place + 0.2 * action
        self.age = self.age + 1
        distance = after.norm(dim=1)
        truncated = self.age >= self.horizon
        self.leaving(truncated)
        self.place = after.clone()
        for row in truncated.nonzero().flatten().tolist():
            self.place[row], self.age[row] = self._start(row), 0
        return Step(
            obs={"state": self.place},
            next_obs={"state": after},
            reward=-distance,
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            log={"success": distance < 0.2},
        )
