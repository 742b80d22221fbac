"""ResetStateWrapper: starts episodes from saved simulator states that a teacher chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.resets.state_library import Trajectories, restored
from embodied.teachers.teacher import Outcome

NEVER = 1 << 40
DEFAULT_RESET = -1
"""Instead of the index of a saved state: the environment's own initial state."""


class InitialStates(Protocol):
    """Chooses the saved state from which each episode starts (a `ResetDistribution`)."""

    config: Any
    paths: Trajectories
    pending: dict[int, tuple[int, Any]]

    def sample(self, n: int) -> tuple[Tensor, Tensor]: ...
    def update(self, ticket: Tensor, outcome: Outcome) -> None: ...
    def count_steps(self, steps: int) -> None: ...


class ResetStateWrapper(Wrapper):
    """Starts each new episode from the state that `resets` samples. Episodes from a saved state are
    truncated after `resets.config.limit` steps.

    In `episode_log`, an episode's task is the time of its initial state as a share of the longest
    trajectory (0: the environment's own reset). `log["ticket"]` [B] is the id of the episode.
    """

    def __init__(
        self, env: VecEnv, resets: InitialStates, episode_log: EpisodeLog | None = None
    ) -> None:
        super().__init__(env)
        self.resets = resets
        self.episode_log = episode_log
        zeros = torch.zeros(self.num_envs, device=self.device)
        whole = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.memory = {
            "ticket": whole - 1,
            "left": whole + NEVER,
            "began": whole + DEFAULT_RESET,
            **{name: zeros.clone() for name in ("return", "won", "length")},
        }

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Interrupted episodes are not reported to the teacher."""
        if mask is None:
            self.resets.pending.clear()
        return self._place(self.env.reset(seed, task, mask), self.rows(mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self.resets.count_steps(self.num_envs)
        late = self._count(step)
        log = {**step.log, "ticket": self.memory["ticket"]}
        over = step.ended | late
        if not over.any():
            return replace(step, log=log)
        following = {key: value.clone() for key, value in step.next_obs.items()}
        obs = step.obs
        if late.any():
            self._notify_before_reset(late)
            obs = self.env.reset(mask=late)
        self._report(over.nonzero().flatten())
        obs = self._place(obs, over)
        truncated = step.truncated | late
        return replace(step, obs=obs, next_obs=following, truncated=truncated, log=log)

    def _count(self, step: Step) -> Tensor:
        """Add the step to the episode statistics; returns [B]: time limit reached."""
        memory, success = self.memory, step.log.get("success")
        won = torch.full_like(memory["won"], torch.nan) if success is None else success.float()
        memory["return"] = memory["return"] + step.reward
        memory["length"] = memory["length"] + 1
        memory["won"] = torch.maximum(memory["won"], won)
        memory["left"] = memory["left"] - 1
        return (memory["left"] <= 0) & ~step.ended

    def _report(self, at: Tensor) -> None:
        memory = self.memory
        # Teachers compute on the CPU.
        outcome = Outcome(*(memory[key][at].cpu() for key in ("return", "won", "length")))
        ticket = memory["ticket"][at].cpu()
        self.resets.update(ticket, outcome)
        if self.episode_log is None:
            return
        columns = {"return": outcome.ret, "success": outcome.success, "length": outcome.length}
        numbers = {name: value.numpy() for name, value in columns.items()}
        began, time = memory["began"][at].cpu(), self.resets.paths.time
        along = (
            torch.where(began == DEFAULT_RESET, 0, time[began]) / self.resets.paths.lengths.max()
        )
        self.episode_log.add(ticket.tolist(), along[:, None].numpy().astype(float), numbers)

    def _place(self, obs: Tensors, rows: Tensor) -> Tensors:
        """Load the sampled states into the envs `rows` [B] (bool), which have just been reset."""
        memory, at = self.memory, rows.nonzero().flatten()
        index, ticket = self.resets.sample(len(at))
        index = index.to(self.device)
        limit = self.resets.config.limit
        for key in ("return", "won", "length"):
            memory[key] = memory[key].masked_fill(rows, 0)
        memory["ticket"] = memory["ticket"].index_copy(0, at, ticket.to(self.device))
        memory["began"] = memory["began"].index_copy(0, at, index)
        bounded = (index != DEFAULT_RESET) & bool(limit)
        left = torch.where(bounded, limit, torch.full_like(index, NEVER))
        memory["left"] = memory["left"].index_copy(0, at, left)
        placed = (index != DEFAULT_RESET).nonzero().flatten()
        if not len(placed):
            return obs
        state = self.env.get_state()
        saved = self.resets.paths.states
        return self.env.set_state(
            restored(state, at[placed], saved, index[placed].cpu(), self.env.state_roles)
        )
