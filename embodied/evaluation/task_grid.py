"""TaskGridEval: evaluation on a fixed grid of tasks, one episode each, the same in every run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.atomic_write import write_durably
from embodied.core.build import ConfigError
from embodied.core.env import HasHeldOutNames, HasHeldOutTasks, Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.evaluation.evaluate import Evaluation

FILE = "exam.jsonl"
"""The per-task results in a run folder."""
MAX_TASKS = 10_000


def grid(spec: Spec, each: int) -> Tensor:
    """The centres of `each` ** D cells of the task space, [N, D] (float32), the last element
    fastest."""
    if spec.task is None or not spec.task.size:
        raise ConfigError("eval.grid needs an environment with task parameters; this one has none")
    if each**spec.task.size > MAX_TASKS:
        raise ConfigError(
            f"eval.grid={each} with {spec.task.size} task parameters is {each**spec.task.size:,} "
            f"episodes; at most {MAX_TASKS:,}"
        )
    middles = [(i + 0.5) / each for i in range(each)]
    return torch.tensor(list(itertools.product(middles, repeat=spec.task.size)))


def held_out(env: VecEnv) -> Tensor | None:
    """The task vectors [N, D] that the environment reserves for evaluation; None if it has none."""
    keeper = find_protocol(env, HasHeldOutTasks)
    return None if keeper is None else keeper.held_out


class TaskGridEval(Wrapper):
    """Parallel env i of B runs tasks i, i + B, i + 2B, ... of `tasks` [N, D], cyclically: the order
    in which `evaluate` lists episodes."""

    def __init__(self, env: VecEnv, tasks: Tensor) -> None:
        super().__init__(env)
        self.tasks = tasks
        self.memory = {"begun": torch.arange(self.num_envs, device=self.device)}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        every = torch.arange(self.num_envs, device=self.device)
        self.memory["begun"] = torch.where(self.rows(mask), every, self.memory["begun"])
        return self.env.reset(seed, self._next_tasks(), mask)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        if not step.ended.any():
            return step
        following = {key: value.clone() for key, value in step.next_obs.items()}
        self.memory["begun"] = self.memory["begun"] + self.num_envs * step.ended
        obs = self.env.reset(None, self._next_tasks(), step.ended)
        return replace(step, obs=obs, next_obs=following)

    @property
    def names(self) -> list[dict[str, str]]:
        """`name` of each held-out task; nothing for a grid."""
        named, tasks, n = (
            find_protocol(self.env, HasHeldOutNames),
            held_out(self.env),
            len(self.tasks),
        )
        if named is None or tasks is None or not torch.equal(tasks[:n], self.tasks):
            return [{}] * n
        return [{"name": name} for name in named.held_out_names[:n]]

    def _next_tasks(self) -> Tensor:
        return self.tasks[self.memory["begun"].cpu() % len(self.tasks)].to(self.device)

    def write(self, folder: Path, step: int, result: Evaluation) -> None:
        """Append each task's result to the run's `exam.jsonl`; results of this step or later, from
        an interrupted run, are replaced."""
        won = [None] * len(self.tasks) if result.success is None else result.success.tolist()
        outcomes = zip(self.names, self.tasks, won, result.returns, result.lengths, strict=True)
        lines = [
            json.dumps(
                {
                    "step": step,
                    **name,
                    "task": [round(float(value), 5) for value in task],
                    "success": success,
                    "return": round(float(ret), 4),
                    "length": int(length),
                }
            )
            for name, task, success, ret, length in outcomes
        ]
        file = folder / FILE
        before = file.read_text().splitlines() if file.exists() else []
        kept = [line for line in before if json.loads(line)["step"] < step]
        write_durably(file, lambda sink: sink.write("\n".join([*kept, *lines, ""]).encode()))
