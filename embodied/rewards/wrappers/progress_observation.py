"""Wrapper that adds the predicted progress of each running episode, from its newest frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

PROGRESS = "privileged/progress"


class ProgressObservation(Wrapper):
    """Adds `privileged/progress`, float32 [B]: `predict(first, newest)` of the features of each
    episode's first frame [B, F] and of its `reach` newest ones [B, reach, F], oldest first. Before
    the start of an episode, its first frame is repeated.

    `features(obs)` gives the features [B, F] of observations.
    """

    def __init__(
        self,
        env: VecEnv,
        features: Callable[[Tensors], Tensor],
        predict: Callable[[Tensor, Tensor], Tensor],
        reach: int,
    ) -> None:
        super().__init__(env, env.spec.with_obs(**{PROGRESS: Leaf((), low=0.0, high=1.0)}))
        self.features = features
        self.predict = predict
        self.reach = reach

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._begin(self.features(obs), self.rows(mask))
        return self.transform_obs(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        past = self.memory["past"]
        past = torch.cat([past[:, 1:], self.features(step.next_obs)[:, None]], 1)
        after = self.predict(self.memory["first"], past)
        self.memory = {**self.memory, "past": past, "progress": after}
        if step.ended.any():
            self._begin(self.features(step.obs), step.ended)
        following = {**step.next_obs, PROGRESS: after}
        return replace(step, obs=self.transform_obs(step.obs), next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, PROGRESS: self.memory["progress"]}

    def _begin(self, features: Tensor, rows: Tensor) -> None:
        """Episodes begin in the envs `rows` [B] (bool)."""
        past = features[:, None].expand(-1, self.reach, -1)
        fresh = {"first": features, "past": past, "progress": self.predict(features, past)}
        if not self.memory:
            self.memory = {name: value.clone() for name, value in fresh.items()}
        self.memory = {
            name: torch.where(rows.view(-1, *[1] * (old.ndim - 1)), fresh[name], old)
            for name, old in self.memory.items()
        }
