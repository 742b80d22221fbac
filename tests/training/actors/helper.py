"""For actors: runs, an environment that counts, an operator, a learner to kill."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import allow
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted.intervener import Intervener
from embodied.training.components import RunComponents
from embodied.training.logger import Log
from embodied.training.train import train

NODE: dict[str, Any] = {
    "name": "acted",
    "env": {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 4, "horizon": 8},
    "policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]},
    "learner": {"_target_": "embodied.learners.off_policy.sac.Sac", "hidden": [8], "batch_size": 8},
    "steps": 240,
    "data": {"warmup_steps": 64, "utd_ratio": 0.25},
    "eval": {"episodes": 4, "num_envs": 4},
    "video": False,
}
CHUNKS = {"policy": {**NODE["policy"], "chunk": 2}}
N_STEP = {"learner": {**NODE["learner"], "n_step": 3}}
INTERVENED = {
    "reward": {
        "_target_": "embodied.rewards.success.interventions.Interventions",
        "intervener": {"_target_": "tests.training.actors.helper.Helper"},
    }
}


LOCKSTEP = {"actors": 1, "max_lag": 0}


def run(folder: Path, node: dict[str, Any], data: dict[str, Any] | None = None, **more: Any) -> Any:
    """The learner's state at the end, and the last evaluation."""
    node = {**node, "out": str(folder), **more, "data": {**node["data"], **(data or {})}}
    train(node, Log(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return checkpoint.load_state(folder, "learner"), lines


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def alive(pid: int) -> bool:
    """Whether the process runs: one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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


def pid_of(actor: Any) -> int:
    """Of an actor's process, on either transport."""
    if hasattr(actor, "process"):
        return actor.process.pid
    return actor.ray.get(actor.worker.__ray_call__.remote(lambda worker: os.getpid()))


def left_of(driver: int) -> list[Path]:
    """The processes of the Ray cluster that `driver` started: Ray's folders have its number."""
    session = f"_{driver}/".encode()
    return [file for file in Path("/proc").glob("[0-9]*/cmdline") if session in contents(file)]


def contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it ended
        return b""


def step_of(loop: Any) -> int:
    """The count of the env after one more step."""
    return int(loop._step()[1].next_obs["state"][0, 0])


def lost_in(loop: Any) -> list[int]:
    """The envs whose running episodes were lost in the last step."""
    lost = loop.collector.restarted
    return [] if lost is None else lost.tolist()


def learn(path: str) -> None:
    """Train the run of a YAML file, with the actors' process numbers in `actors.txt`."""
    allow("tests")
    node = yaml.safe_load(Path(path).read_text())
    build = RunComponents.__init__

    def noted(self: RunComponents, *arguments: object) -> None:
        build(self, *arguments)  # type: ignore[arg-type]
        pids = [str(pid_of(actor)) for actor in self.env.actors]  # type: ignore[union-attr]
        Path(node["out"]).mkdir()
        (Path(node["out"]) / "actors.txt").write_text(" ".join(pids))

    RunComponents.__init__ = noted  # type: ignore[method-assign]
    train(node, Log(Path(node["out"]), silent=True))
