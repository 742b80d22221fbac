"""Image store: each observation is stored once and referred to by its index.

A replay buffer would hold every image twice (`obs` and `next_obs`), and every sampled batch would
run the reward network on it again. With an index, an image is scored once when it is new and once
after every change of the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

IMAGE_INDEX = "privileged/sight"


class ImageStore:
    """Ring buffer of the newest `capacity` observations. Indices count up from 0 and are never
    reused; scores are kept for all of them, also for observations that were overwritten."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.images: Tensors = {}
        self.reward = torch.full((capacity,), torch.nan)  # of the env; NaN: initial state
        self.scores = torch.zeros(1024)

    @property
    def oldest(self) -> int:
        return max(0, self.count - self.capacity)

    def add(self, images: Tensors) -> Tensor:
        """Store observations, leaves [n, ...]; returns their indices [n]."""
        n = tt.length(images)
        numbers = torch.arange(self.count, self.count + n)
        if not self.images:
            self.images = tt.each(images, lambda v: v.new_zeros(self.capacity, *v.shape[1:]).cpu())
        tt.put(self.images, numbers % self.capacity, tt.to(images, "cpu"))
        self.reward[numbers % self.capacity] = torch.nan
        self.count += n
        if self.count > len(self.scores):
            self.scores = torch.cat([self.scores, torch.zeros(max(len(self.scores), n))])
        return numbers

    def take(self, numbers: Tensor) -> Tensors:
        """The observations with indices `numbers` [n], which must still be stored, and the
        environment's `reward` [n] of the transitions that led to them."""
        slots = numbers % self.capacity
        return {**tt.take(self.images, slots), "reward": self.reward[slots]}

    def reached(self, newest: int | None = None) -> Tensor:
        """Indices of all stored observations that ended a transition (no initial states), or of
        the `newest` of them only."""
        held = torch.arange(self.oldest, self.count)
        found = held[~self.reward[held % self.capacity].isnan()]
        return found if newest is None else found[-newest:]

    def get_state(self) -> dict[str, Any]:
        filled = min(self.count, self.capacity)
        return {
            "count": self.count,
            "images": {key: value[:filled].clone() for key, value in self.images.items()},
            "reward": self.reward[:filled].clone(),
            "scores": self.scores[: self.count].clone(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.__init__(self.capacity)
        self.add(state["images"])
        self.count = state["count"]
        self.reward[: len(state["reward"])] = state["reward"]
        self.scores = torch.zeros(max(1024, 2 * self.count))
        self.scores[: self.count] = state["scores"]


class ImageIndexWrapper(Wrapper):
    """Adds the observations `names` to `store` and their index `privileged/sight` (int64 [B]) to
    the observations, from which `hidden` ones are then removed."""

    def __init__(
        self, env: VecEnv, store: ImageStore, names: Sequence[str], hidden: Sequence[str] = ()
    ) -> None:
        spec = env.spec.with_obs(**{IMAGE_INDEX: Leaf((), "int64", 0, 2**31 - 1)})
        super().__init__(env, replace(spec, obs=_without(spec.obs, hidden)))
        self.store = store
        self.names = names
        self.hidden = hidden

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.transform_obs(self.env.reset(seed, task, mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        now = self._store(step.obs)
        after = now
        if step.ended.any():
            ended = step.ended.nonzero().flatten()
            after = now.clone()
            after[ended] = self._store(tt.take(step.next_obs, ended))
        obs = {**_without(step.obs, self.hidden), IMAGE_INDEX: now}
        following = {**_without(step.next_obs, self.hidden), IMAGE_INDEX: after}
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**_without(obs, self.hidden), IMAGE_INDEX: self._store(obs)}

    def _store(self, obs: Tensors) -> Tensor:
        return self.store.add({name: obs[name] for name in self.names}).to(self.device)


def _without(leaves: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in leaves.items() if key not in names}
