"""Image store: each observation is stored once and referred to by its index.

A replay buffer would hold every image twice (`obs` and `next_obs`), and every sampled batch would
run the reward network on it again. With an index, an image is scored once when it is new and once
after every change of the network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


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
