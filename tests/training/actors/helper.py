"""For actor processes: an environment that counts, an operator, a learner to kill."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import yaml
from torch import Tensor

from embodied.core.build import allow
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.training.components import RunComponents
from embodied.training.logger import Log
from embodied.training.train import train
from policies.scripted.intervener import Intervener


class Counting(VecEnv):
    """Observes how many steps each env has made; `bad`: the step with a NaN reward; `hz`: its own
    rate (0: as fast as it is asked)."""

    def __init__(self, num_envs: int, bad: int = -1, hz: float = 0.0) -> None:
        self.num_envs, self.bad, self.hz = num_envs, bad, hz
        self.spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
        self.count = torch.zeros(num_envs, 1)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if seed is not None:
            self.count = torch.zeros(self.num_envs, 1)
        return {"state": self.count.clone()}

    def step(self, action: Tensor) -> Step:
        if self.hz:
            time.sleep(1 / self.hz)
        self.count = self.count + 1
        obs, never = {"state": self.count.clone()}, torch.zeros(self.num_envs, dtype=torch.bool)
        late = never | (self.count[:, 0] % 10 == 0)
        reward = torch.full((self.num_envs,), torch.nan if self.count[0, 0] == self.bad else 0.0)
        return Step(obs, obs, reward, never, late, {})

    def get_state(self) -> Tensors:
        return {"count": self.count.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.count = state["count"].clone()
        return {"state": self.count.clone()}


class Helper(Intervener):
    """Takes over in every third step."""

    def __init__(self, num_envs: int) -> None:
        self.steps = torch.zeros(num_envs)

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return torch.full((len(first), 4), 0.5)

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.steps % 3 == 0


def learn(path: str) -> None:
    """Train the run of a YAML file, with the actors' process numbers in `actors.txt`."""
    allow("tests")
    node = yaml.safe_load(Path(path).read_text())
    build = RunComponents.__init__

    def noted(self: RunComponents, *arguments: object) -> None:
        build(self, *arguments)  # type: ignore[arg-type]
        pids = [str(actor.process.pid) for actor in self.env.actors]  # type: ignore[union-attr]
        Path(node["output"]).mkdir()
        (Path(node["output"]) / "actors.txt").write_text(" ".join(pids))

    RunComponents.__init__ = noted  # type: ignore[method-assign]
    train(node, Log(Path(node["output"]), silent=True))
