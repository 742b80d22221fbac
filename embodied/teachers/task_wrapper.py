"""TaskWrapper: starts each episode with a task that a teacher samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from embodied.core.env import ExpectsGivenTasks, Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.student_estimates import StudentEstimates
from embodied.teachers.teacher import Outcome


class TaskSampler(Protocol):
    """Samples tasks and learns from outcomes: a teacher, or its queue for one of two agents."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]: ...
    def update(self, ticket: Tensor, outcome: Outcome) -> None: ...
    def trains(self, ticket: Tensor) -> Tensor: ...
    def forget(self) -> None: ...


class TaskWrapper(Wrapper):
    """Resets finished envs with a task from `teacher.sample` and reports outcomes to the teacher.

    `log["ticket"]` [B] is the id of the episode. With `estimates`, outcomes are passed to it, where
    they wait for the student's value estimates; `log["learn"]` [B] (bool) then says whether the
    student trains on the step.
    """

    def __init__(
        self,
        env: VecEnv,
        teacher: TaskSampler,
        episode_log: EpisodeLog | None = None,
        estimates: StudentEstimates | None = None,
    ) -> None:
        super().__init__(env)
        self.teacher = teacher
        self.episode_log = episode_log
        self.estimates = estimates
        drawing = find_protocol(env, ExpectsGivenTasks)
        if drawing is not None:
            drawing.expect_given_tasks()
        zeros = torch.zeros(self.num_envs, device=self.device)
        self.memory = {
            "ticket": torch.full((self.num_envs,), -1, dtype=torch.int64, device=self.device),
            "return": zeros,
            "won": zeros.clone(),
            "length": zeros.clone(),
            "task": zeros.new_zeros(self.num_envs, env.spec.task.size if env.spec.task else 0),
        }
        if estimates is not None:
            self.memory["learn"] = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Interrupted episodes are not reported to the teacher."""
        if mask is None:
            self.teacher.forget()
            if self.estimates is not None:
                self.estimates.clear()
        return self._begin(self.rows(mask), seed)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        memory, success = self.memory, step.log.get("success")
        memory["return"] = memory["return"] + step.reward
        memory["length"] = memory["length"] + 1
        won = torch.full_like(memory["won"], torch.nan) if success is None else success.float()
        memory["won"] = torch.maximum(memory["won"], won)
        log = step.log | {key: memory[key] for key in ("ticket", "learn") if key in memory}
        if not step.ended.any():
            return replace(step, log=log)
        following = {key: value.clone() for key, value in step.next_obs.items()}
        at = step.ended.nonzero().flatten()
        # Teachers compute on the CPU.
        outcome = Outcome(*(memory[key][at].cpu() for key in ("return", "won", "length")))
        ticket = memory["ticket"][at].cpu()
        report = self.teacher.update if self.estimates is None else self.estimates.episodes_ended
        report(ticket, outcome)
        if self.episode_log is not None:
            columns = {"return": outcome.ret, "success": outcome.success, "length": outcome.length}
            numbers = {name: value.numpy() for name, value in columns.items()}
            self.episode_log.add(ticket.tolist(), memory["task"][at].cpu().numpy(), numbers)
        obs = self._begin(step.ended, None)
        return replace(step, obs=obs, next_obs=following, log=log)

    def _begin(self, rows: Tensor, seed: int | None) -> Tensors:
        memory, at = self.memory, rows.nonzero().flatten()
        task, ticket = self.teacher.sample(len(at))
        for key in ("return", "won", "length"):
            memory[key] = memory[key].masked_fill(rows, 0)
        memory["ticket"] = memory["ticket"].index_copy(0, at, ticket.to(self.device))
        if "learn" in memory:
            learn = self.teacher.trains(ticket).to(self.device)
            memory["learn"] = memory["learn"].index_copy(0, at, learn)
        memory["task"] = memory["task"].index_copy(0, at, task.to(self.device))
        mask = None if rows.all() else rows
        return self.env.reset(seed, memory["task"], mask)
