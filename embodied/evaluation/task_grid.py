"""Exam: evaluation on a fixed grid of a world's tasks, one episode each, the same in every run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.atomic_write import write_durably
from embodied.core.build import ConfigError
from embodied.core.env import HasHeldOutTasks, Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.evaluation.evaluate import Evaluation

FILE = "exam.jsonl"
MOST = 10_000  # tasks


def grid(spec: Spec, each: int) -> Tensor:
    """The middles of `each` ** D cells of the task space, [N, D] (float32), the last element
    fastest."""
    if spec.task is None or not spec.task.size:
        raise ConfigError("eval.grid is of task parameters; this world has none")
    if each**spec.task.size > MOST:
        raise ConfigError(
            f"eval.grid={each} of {spec.task.size} task parameters is {each**spec.task.size:,} "
            f"episodes; at most {MOST:,}"
        )
    middles = [(i + 0.5) / each for i in range(each)]
    return torch.tensor(list(itertools.product(middles, repeat=spec.task.size)))


def held_out(env: VecEnv) -> Tensor | None:
    """The task vectors [N, D] that the environment reserves for evaluation; None if it has none."""
    keeper = find_protocol(env, HasHeldOutTasks)
    return None if keeper is None else keeper.held_out


class Exam(Wrapper):
    """Row r of B plays tasks r, r + B, r + 2B, ... of `tasks` [N, D], and begins again after them:
    the order in which `evaluate` lists its episodes."""

    def __init__(self, env: VecEnv, tasks: Tensor) -> None:
        super().__init__(env)
        self.tasks = tasks
        self.memory = {"begun": torch.arange(self.num_envs, device=self.device)}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        every = torch.arange(self.num_envs, device=self.device)
        begun = torch.where(self.rows(mask), every, self.memory["begun"])
        self.memory["begun"] = begun
        return self.env.reset(seed, self._due(), mask)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        if not step.ended.any():
            return step
        following = {key: value.clone() for key, value in step.next_obs.items()}
        self.memory["begun"] = self.memory["begun"] + self.num_envs * step.ended
        obs = self.env.reset(None, self._due(), step.ended)
        return replace(step, obs=obs, next_obs=following)

    def _due(self) -> Tensor:
        return self.tasks[self.memory["begun"].cpu() % len(self.tasks)].to(self.device)

    def write(self, folder: Path, step: int, result: Evaluation) -> None:
        """Append each task's outcome to the run's `exam.jsonl`; what an interrupted run wrote at
        this step or later goes."""
        won = [None] * len(self.tasks) if result.success is None else result.success.tolist()
        outcomes = zip(self.tasks, won, result.returns, result.lengths, strict=True)
        lines = [
            json.dumps(
                {
                    "step": step,
                    "task": [round(float(value), 5) for value in task],
                    "success": success,
                    "return": round(float(ret), 4),
                    "length": int(length),
                }
            )
            for task, success, ret, length in outcomes
        ]
        file = folder / FILE
        before = file.read_text().splitlines() if file.exists() else []
        kept = [line for line in before if json.loads(line)["step"] < step]
        write_durably(file, lambda sink: sink.write("\n".join([*kept, *lines, ""]).encode()))
