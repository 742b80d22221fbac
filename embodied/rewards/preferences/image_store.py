"""Album: what a world looked like, once each, by number; rows then hold a number, not a picture.

A replay of pictures holds each of them twice and asks a network about it at every sampling; with
numbers it is looked at once when it is new and once when the network has changed.
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

NUMBER = "privileged/sight"


class Album:
    """The newest `capacity` sights; numbers count from 0 and never repeat. Scores are kept for all
    numbers: what is no longer seen keeps its last."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self.sights: Tensors = {}
        self.reward = torch.full((capacity,), torch.nan)  # the world's own; NaN: no row ended there
        self.scores = torch.zeros(1024)

    @property
    def oldest(self) -> int:
        return max(0, self.count - self.capacity)

    def add(self, sights: Tensors) -> Tensor:
        """Keep sights [n, ...] of every name; their numbers [n]."""
        n = tt.length(sights)
        numbers = torch.arange(self.count, self.count + n)
        if not self.sights:
            self.sights = tt.each(sights, lambda v: v.new_zeros(self.capacity, *v.shape[1:]).cpu())
        tt.put(self.sights, numbers % self.capacity, tt.to(sights, "cpu"))
        self.reward[numbers % self.capacity] = torch.nan
        self.count += n
        if self.count > len(self.scores):
            self.scores = torch.cat([self.scores, torch.zeros(max(len(self.scores), n))])
        return numbers

    def take(self, numbers: Tensor) -> Tensors:
        """The sights and rewards of numbers [n] that are still held."""
        slots = numbers % self.capacity
        return {**tt.take(self.sights, slots), "reward": self.reward[slots]}

    def reached(self, newest: int | None = None) -> Tensor:
        """Numbers of what rows ended in and is still held; of the `newest` of those only."""
        held = torch.arange(self.oldest, self.count)
        found = held[~self.reward[held % self.capacity].isnan()]
        return found if newest is None else found[-newest:]

    def get_state(self) -> dict[str, Any]:
        filled = min(self.count, self.capacity)
        return {
            "count": self.count,
            "sights": {key: value[:filled].clone() for key, value in self.sights.items()},
            "reward": self.reward[:filled].clone(),
            "scores": self.scores[: self.count].clone(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.__init__(self.capacity)
        self.add(state["sights"])
        self.count = state["count"]
        self.reward[: len(state["reward"])] = state["reward"]
        self.scores = torch.zeros(max(1024, 2 * self.count))
        self.scores[: self.count] = state["scores"]


class Numbered(Wrapper):
    """Puts the observations `names` into an album and adds their number; `hidden` ones are then
    taken out."""

    def __init__(
        self, env: VecEnv, album: Album, names: Sequence[str], hidden: Sequence[str] = ()
    ) -> None:
        spec = env.spec.with_obs(**{NUMBER: Leaf((), "int64", 0, 2**31 - 1)})
        super().__init__(env, replace(spec, obs=_without(spec.obs, hidden)))
        self.album, self.names, self.hidden = album, names, hidden

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.transform_obs(self.env.reset(seed, task, mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        now = self._keep(step.obs)
        after = now
        if step.ended.any():
            ended = step.ended.nonzero().flatten()
            after = now.clone()
            after[ended] = self._keep(tt.take(step.next_obs, ended))
        obs = {**_without(step.obs, self.hidden), NUMBER: now}
        following = {**_without(step.next_obs, self.hidden), NUMBER: after}
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**_without(obs, self.hidden), NUMBER: self._keep(obs)}

    def _keep(self, obs: Tensors) -> Tensor:
        return self.album.add({name: obs[name] for name in self.names}).to(self.device)


def _without(leaves: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in leaves.items() if key not in names}
