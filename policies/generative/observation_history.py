"""Observation history: samplers that observe the last `obs_steps` steps, as Diffusion Policy does.

The past observations are in the carry (`core.history`). One encoder, with the same weights for all
steps, makes the features of each step; the network gets them side by side, oldest first. Diffusion
Policy (Chi et al., 2023) uses 2 steps, DPPO, ReinFlow and Q-chunking 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.core.history import FRESH, HISTORY, with_history
from embodied.core.tensors import Tensors, each
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.real_time_chunking import GuidedSampler


class ObservesHistory(GuidedSampler):
    """A sampler whose decisions use the `past` observations `names` before the present one."""

    past: int = 0
    names: Sequence[str] = ()

    def initial(self, n: int) -> Tensors:
        if not self.past:
            return {}
        device = next(self.parameters()).device
        kept = {HISTORY + name: self._zeros(name, n, device) for name in self.names}
        return {**kept, FRESH: torch.ones(n, dtype=torch.bool, device=device)}

    def _zeros(self, name: str, n: int, device: torch.device) -> Tensor:
        leaf = self.spec.obs[name]
        zeros = leaf.zeros(n, device)[:, None]
        return zeros.repeat(1, self.past, *[1] * len(leaf.shape))

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return with_history(obs, carry), carry

    @property
    def augments(self) -> bool:
        return self.past > 0


class EncodesHistory(ObservesHistory):
    """... with an `encoder` of one step's observations."""

    encoder: Encoder

    def set_obs_steps(self, steps: int) -> None:
        """Observe `steps` steps, the present one included; ConfigError below 1."""
        self.past, self.names = steps - 1, self.encoder.names

    @property
    def feature_size(self) -> int:
        return self.encoder.size * (self.past + 1)

    def features(self, obs: Tensors) -> Tensor:
        """Features [n, feature_size] of `obs`, with `history/NAME` [n, past, ...] where there are
        past steps; without them, those of the present one repeated."""
        if not self.past:
            return self.encoder(obs)
        steps = {name: self._steps(obs, name) for name in self.names}
        encoded = self.encoder(each(steps, lambda leaf: leaf.flatten(0, 1)))
        return encoded.view(-1, self.feature_size)

    def _steps(self, obs: Tensors, name: str) -> Tensor:
        """The observations NAME [n, past + 1, ...], oldest first."""
        now = obs[name][:, None]
        copies = now.expand(-1, self.past, *now.shape[2:])
        return torch.cat([obs.get(HISTORY + name, copies).to(now.dtype), now], 1)
