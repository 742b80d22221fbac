"""VisitCountWrapper: episodic visit counts as an additional observation.

The key is `privileged/visits`, 1 at the first visit. States are compared by a 64-bit hash of the
policy's observations (floats rounded to 1/1000) and counted per episode and env.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, hidden
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

VISITS = "privileged/visits"
GRID = 1000.0  # floats are rounded to 1 / GRID
ROOM = 64  # steps by which the history grows


class VisitCountWrapper(Wrapper):
    """`leaf`: the observation that is counted (None: all policy observations)."""

    def __init__(self, env: VecEnv, leaf: str | None = None) -> None:
        super().__init__(env, env.spec.with_obs(**{VISITS: Leaf((), "int64", 1, 2**31 - 1)}))
        seen = [k for k in sorted(env.spec.obs) if not hidden(k)]
        if leaf is not None and leaf not in env.spec.obs:
            raise ConfigError(f"no observation {leaf}{nearest(leaf, env.spec.obs)}")
        self.leaves = seen if leaf is None else [leaf]
        size = sum(env.spec.obs[name].size for name in self.leaves)
        generator = torch.Generator().manual_seed(0)
        self.salt = torch.randint(2**62, (size,), generator=generator) * 2 + 1
        self.memory = {
            "past": torch.zeros(self.num_envs, ROOM, dtype=torch.int64),
            "age": torch.zeros(self.num_envs, dtype=torch.int64),
        }

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        began = self.rows(mask).cpu()
        self.memory["age"][began] = 0
        return {**obs, VISITS: self._record(obs, began)}

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        every = torch.ones(self.num_envs, dtype=torch.bool)
        after = self._record(step.next_obs, every)
        ended = step.ended.cpu()
        now = after
        if ended.any():
            self.memory["age"][ended] = 0
            now = torch.where(step.ended, self._record(step.obs, ended), after)
        obs, following = {**step.obs, VISITS: now}, {**step.next_obs, VISITS: after}
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, VISITS: self._counts(obs)[1].to(self.device)}

    def _record(self, obs: Tensors, who: Tensor) -> Tensor:
        """Record the observations of the envs `who` [B] (bool); returns all visit counts [B]."""
        age, past = self.memory["age"], self.memory["past"]
        if int(age.max()) >= past.shape[1]:
            past = torch.cat([past, torch.zeros_like(past)], 1)
            self.memory["past"] = past
        words = self._hash(obs)
        index = who.nonzero().flatten()
        past[index, age[index]] = words[index]
        age[index] += 1
        return self._counts(obs)[1].to(self.device)

    def _counts(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        words = self._hash(obs)
        age = self.memory["age"]
        past = self.memory["past"]
        lived = torch.arange(past.shape[1]) < age[:, None]
        return words, ((past == words[:, None]) & lived).sum(1).clamp(min=1)

    def _hash(self, obs: Tensors) -> Tensor:
        parts = [obs[name].cpu().reshape(self.num_envs, -1) for name in self.leaves]
        whole = [
            (part * GRID).round().long() if part.is_floating_point() else part.long()
            for part in parts
        ]
        # Integer overflow wraps around, which makes this a hash.
        return (torch.cat(whole, 1) * self.salt).sum(1)
