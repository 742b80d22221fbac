"""Placed: a world whose episodes begin from the saved states that a reset distribution chooses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.teachers.episode_log import Diary
from embodied.teachers.resets.reset_distribution import AS_USUAL, ResetDistribution
from embodied.teachers.resets.state_library import moved
from embodied.teachers.teacher import Outcome

NEVER = 1 << 40


class Placed(Wrapper):
    """Each row that ends begins again where `resets` says. An episode from a saved state is
    truncated after `resets.config.limit` steps: its value still counts.

    In the diary, an episode's task is how far along the longest trajectory it began (0: as the
    world begins). `log["ticket"]` [B] says which episode a step belonged to."""

    def __init__(self, env: VecEnv, resets: ResetDistribution, diary: Diary | None = None) -> None:
        super().__init__(env)
        self.resets, self.diary = resets, diary
        zeros = torch.zeros(self.num_envs, device=self.device)
        whole = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.memory = {
            "ticket": whole - 1,
            "left": whole + NEVER,
            "began": whole + AS_USUAL,
            **{name: zeros.clone() for name in ("return", "won", "length")},
        }

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Episodes that are broken off by this teach nothing."""
        if mask is None:
            self.resets.pending.clear()
        return self._place(self.env.reset(seed, task, mask), self.rows(mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self.resets.passed(self.num_envs)
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
        self._tell(over.nonzero().flatten())
        obs = self._place(obs, over)
        truncated = step.truncated | late
        return replace(step, obs=obs, next_obs=following, truncated=truncated, log=log)

    def _count(self, step: Step) -> Tensor:
        """Take the step up; [B]: whose time is over."""
        memory, success = self.memory, step.log.get("success")
        won = torch.full_like(memory["won"], torch.nan) if success is None else success.float()
        memory["return"] = memory["return"] + step.reward
        memory["length"] = memory["length"] + 1
        memory["won"] = torch.maximum(memory["won"], won)
        memory["left"] = memory["left"] - 1
        return (memory["left"] <= 0) & ~step.ended

    def _tell(self, at: Tensor) -> None:
        memory = self.memory
        outcome = Outcome(*(memory[key][at] for key in ("return", "won", "length")))
        self.resets.update(memory["ticket"][at], outcome)
        if self.diary is None:
            return
        columns = {"return": outcome.ret, "success": outcome.success, "length": outcome.length}
        numbers = {name: value.cpu().numpy() for name, value in columns.items()}
        began, time = memory["began"][at].cpu(), self.resets.paths.time
        along = torch.where(began == AS_USUAL, 0, time[began]) / self.resets.paths.lengths.max()
        self.diary.add(memory["ticket"][at].tolist(), along[:, None].numpy().astype(float), numbers)

    def _place(self, obs: Tensors, rows: Tensor) -> Tensors:
        """Rows [B] (bool) have begun as the world begins: move them to their states."""
        memory, at = self.memory, rows.nonzero().flatten()
        index, ticket = self.resets.sample(len(at))
        index = index.to(self.device)
        limit = self.resets.config.limit
        for key in ("return", "won", "length"):
            memory[key] = memory[key].masked_fill(rows, 0)
        memory["ticket"] = memory["ticket"].index_copy(0, at, ticket.to(self.device))
        memory["began"] = memory["began"].index_copy(0, at, index)
        bounded = (index != AS_USUAL) & bool(limit)
        left = torch.where(bounded, limit, torch.full_like(index, NEVER))
        memory["left"] = memory["left"].index_copy(0, at, left)
        placed = (index != AS_USUAL).nonzero().flatten()
        if not len(placed):
            return obs
        state = self.env.get_state()
        saved = self.resets.paths.states
        return self.env.set_state(moved(state, at[placed], saved, index[placed].cpu()))
