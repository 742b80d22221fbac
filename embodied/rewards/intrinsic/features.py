"""Observations as one flat feature vector, for small reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError, nearest
from embodied.core.remembered import Remembered
from embodied.core.spec import Leaf, hidden
from embodied.core.tensors import Tensors, under
from embodied.nn.normalizers import RunningMeanStd
from embodied.policies.networks.encoders import OneHot

BLOCKS = 16  # side of a pooled image, pixels


class ObservationFeatures:
    """The observations `leaves` (None: all of the policy's) as one flat feature vector.

    Vectors are normalised by running statistics and clipped at 5 standard deviations; images are
    average-pooled and scaled to [0, 1]; discrete observations are one-hot.
    """

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        leaves: tuple[str, ...] | None,
        device: torch.device | str = "cpu",
    ) -> None:
        names = sorted(name for name in obs if not hidden(name)) if leaves is None else leaves
        for name in names:
            if name not in obs:
                raise ConfigError(f"reward.leaves: no observation {name}{nearest(name, obs)}")
        symbols = {name: obs[name] for name in names if obs[name].is_symbol}
        self.pictures = [name for name in names if obs[name].is_image]
        self.vectors = [n for n in names if n not in symbols and n not in self.pictures]
        self.symbols = OneHot(symbols).to(device) if symbols else None
        flat = sum(obs[name].size for name in self.vectors)
        self.moments = RunningMeanStd(flat, device)
        channels = sum(obs[name].shape[2] for name in self.pictures)
        named = 0 if self.symbols is None else self.symbols.size
        self.size = flat + channels * BLOCKS * BLOCKS + named
        if not self.size:
            raise ConfigError("no observation to compute the reward from: set reward.leaves=[...]")

    def __call__(self, transitions: Tensors, end: str) -> Tensor:
        """Features [N, size] (float32) of the observations `end` ("obs" or "next_obs") of
        transitions."""
        obs = under(transitions, end)
        parts = [self.moments.normalize(self._flat(obs))] if self.vectors else []
        for name in self.pictures:  # uint8 [N, H, W, C] to [N, C * BLOCKS^2] in [0, 1]
            chw = obs[name].permute(0, 3, 1, 2).float()
            parts.append(functional.adaptive_avg_pool2d(chw, BLOCKS).flatten(1) / 255)
        if self.symbols is not None:
            parts.append(self.symbols(obs))
        return torch.cat(parts, 1)

    def update(self, transitions: Tensors, end: str) -> None:
        if self.vectors:
            self.moments.update(self._flat(under(transitions, end)))

    def _flat(self, obs: Tensors) -> Tensor:
        return torch.cat([obs[n].float().reshape(len(obs[n]), -1) for n in self.vectors], 1)

    def get_state(self) -> dict[str, Any]:
        return self.moments.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.moments.set_state(state)


NEIGHBOURS = 5000  # newest states among which neighbours are looked for


class Novelty(Remembered):
    """log(1 + d) of the distance d of a state to the `k`-th nearest of the newest states; 0 while
    there are too few, and for k = 0."""

    remembered = ("features", "states")

    def __init__(self, obs: Mapping[str, Leaf], k: int, device: torch.device) -> None:
        self.k = k
        self.features = ObservationFeatures(obs, None, device) if k else None
        self.states = torch.zeros(0, 0, device=device)

    def add(self, transitions: Tensors) -> None:
        """Keep the states that transitions led to; the oldest beyond NEIGHBOURS are dropped."""
        if self.features is None:
            return
        self.features.update(transitions, "next_obs")
        new = self.features(transitions, "next_obs")
        known = self.states if len(self.states) else new[:0]
        self.states = torch.cat([known, new])[-NEIGHBOURS:]

    def __call__(self, transitions: Tensors) -> Tensor:
        """The bonus [N]. A state is among those that are kept, so that it has a neighbour more."""
        if self.features is None or len(self.states) <= self.k:
            return torch.zeros_like(transitions["reward"])
        distance = torch.cdist(self.features(transitions, "next_obs"), self.states)
        return distance.kthvalue(self.k + 1, 1).values.log1p()
