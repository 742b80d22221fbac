"""TaskWrapper: starts each episode with a task that a teacher samples.

The teacher may need per-episode averages of the student's advantages and values (StudentEstimates).
An on-policy learner computes them per batch, which may hold parts of several episodes. Sums are
kept by ticket until an episode has ended and all of its steps are known. Scores of prioritized
level replay (Jiang, Grefenstette and Rocktaschel, 2021):

    gain = 1/T sum_t max(A_t, 0),   error = 1/T sum_t |A_t|,   value = 1/T sum_t V(s_t)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.core.env import ExpectsGivenTasks, Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.teacher import Outcome, Teacher

SUMS = 4  # steps, gain, error, value


class StudentEstimates(Remembered):
    """Combines outcomes (`episodes_ended`) with estimates (`add_steps`) for the teacher."""

    remembered = ("sums", "ended")

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.sums: dict[int, list[float]] = {}
        self.ended: dict[int, list[float]] = {}

    def episodes_ended(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended; estimates of their last steps follow."""
        columns = (outcome.ret, outcome.success, outcome.length)
        rows = torch.stack([column.double().cpu() for column in columns], 1).tolist()
        self.ended |= dict(zip(ticket.tolist(), rows, strict=True))

    def add_steps(self, ticket: Tensor, advantage: Tensor, value: Tensor) -> None:
        """Add estimates [N] of all steps since the last call, of episodes `ticket` [N]; then report
        the episodes that have ended to the teacher."""
        known, at = np.unique(ticket.cpu().numpy(), return_inverse=True)
        gap, worth = (part.double().cpu().numpy() for part in (advantage, value))
        columns = (np.ones_like(gap), gap.clip(0), abs(gap), worth)
        sums = np.stack([np.bincount(at, column, len(known)) for column in columns], 1)
        for number, row in zip(known.tolist(), sums.tolist(), strict=True):
            before = self.sums.get(number, [0.0] * SUMS)
            self.sums[number] = [a + b for a, b in zip(before, row, strict=True)]
        self._close()

    def _close(self) -> None:
        if not self.ended:
            return
        tickets = torch.tensor(list(self.ended))
        ends = torch.tensor(list(self.ended.values()), dtype=torch.float64)
        none = [0.0] * SUMS  # 0 / 0: NaN, unknown
        sums = torch.tensor([self.sums.pop(number, none) for number in self.ended]).double()
        self.ended = {}
        self.teacher.update(tickets, Outcome(*ends.T, *(sums[:, 1:] / sums[:, :1]).T))

    def clear(self) -> None:
        """Forget the running episodes: they were interrupted."""
        self.sums = {}
        self.ended = {}


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
