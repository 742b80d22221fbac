"""Deterministic: deterministic policy with additive exploration noise (TD3; Fujimoto, 2018).

a = clip(mu(o) + std e, -1, 1),  mu = tanh(net(o)),  e ~ N(0, 1) to explore and 0 to act.

With `std_range` the std is sampled per episode, uniform in that range, so that parallel
environments explore with different amounts of noise (FastTD3, Seo et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import Feedforward
from embodied.policies.encoded import MlpConfig, MlpPolicy, require_continuous
from embodied.policies.gaussian import require_squashed


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of a deterministic policy; std in units of half the action range.

    `warmup`: before training starts, the untrained policy acts with its noise, or uniform noise.
    """

    std: NonNegative = 0.1  # std of the exploration noise
    std_range: tuple[NonNegative, NonNegative] | None = None  # of the std per episode (null: `std`)
    warmup: Literal["self", "uniform"] = "uniform"  # who acts before training starts


class Deterministic(MlpPolicy):
    """Deterministic policy. Noise [n, chunk * A] is standard normal to explore, otherwise zero.

    With `std_range` noise has one more column, from which the std is set in the first decision of
    an episode; the carry keeps it in `explore/std`. Without a carry every decision sets its own.
    """

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, config.chunk * spec.act.size)

    def forward(self, obs: Tensors) -> Tensor:
        """The action [n, size] without noise; differentiable."""
        raw = self.net(self.encoder(obs))
        return torch.tanh(raw) if self.squashes else raw

    def initial(self, n: int) -> Tensors:
        if self.config.std_range is None:
            return {}
        return {"explore/std": torch.full((n, 1), -1.0, device=self.encoder.norm.mean.device)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.normal_noise(n, self.size + (self.config.std_range is not None), explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        if self.config.std_range is None:
            action = torch.add(self(obs), noise, alpha=self.config.std)
        else:
            low, high = self.config.std_range
            std = low + (high - low) * torch.special.ndtr(noise[:, self.size :])
            if "explore/std" in carry:
                std = torch.where(carry["explore/std"] < 0, std, carry["explore/std"])
                carry = {**carry, "explore/std": std}
            action = torch.addcmul(self(obs), noise[:, : self.size], std)
        return self.in_steps(self.spec.act.bounded(action)), carry

    def feedforward(self) -> Feedforward:
        """The action without noise as plain layers; ConfigError if an observation is no vector."""
        require_squashed(self.spec.act)
        return Feedforward(self.encoder.only_vectors(), self.encoder.norm, self.layers())

    def warmup_policy(self) -> Policy:
        """A policy with uniform actions, or this policy, as `warmup` says."""
        return self if self.config.warmup == "self" else self.uniform()
