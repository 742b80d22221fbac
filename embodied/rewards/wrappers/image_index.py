"""Wrapper that stores observations in an `ImageStore` and adds their index as an observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.rewards.preferences.image_store import ImageStore

IMAGE_INDEX = "privileged/sight"


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
