"""Gaussian: tanh-squashed diagonal Gaussian policy (SAC; Haarnoja et al., 2018).

a = tanh(u), u ~ N(mean(o), std(o)^2);  log p(a) = log N(u) - sum log(1 - tanh(u)^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Number
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import Feedforward, per_row
from embodied.policies.diagonal_gaussian import LOG_2PI, normal_kl
from embodied.policies.encoded import MlpConfig, MlpPolicy, require_continuous


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of a squashed Gaussian policy."""

    log_std: tuple[Number, Number] = (-5.0, 2.0)  # bounds of log std
    soft: bool = True  # soft bounds, std starts in their middle (false: clamped, std starts at 1)
    zero_head: bool = False  # the initial mean is exactly 0
    imitate: Literal["mse", "nll"] = "mse"  # imitation loss; nll also trains the std


class Gaussian(MlpPolicy):
    """Noise [n, chunk * A] is standard normal to explore, zero for the mean action."""

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, 2 * config.chunk * spec.act.size)
        if config.zero_head:
            head = self.net[-1]
            assert isinstance(head, torch.nn.Linear)
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.zeros_(head.bias)

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log std, [n, size] each, before squashing."""
        mean, raw = self.net(self.encoder(obs)).chunk(2, 1)
        low, high = self.config.log_std
        if not self.config.soft:
            return mean, raw.clamp(low, high)
        return mean, low + (high - low) / 2 * (torch.tanh(raw) + 1)

    @property
    def squashed(self) -> bool:
        return self.squashes

    def gaussian(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """See `policies.abilities.HasGaussian`."""
        return self(obs)

    def squash(self, u: Tensor) -> Tensor:
        """tanh(u); `u` itself where a wrapper normalises actions, some of which are beyond 1."""
        return torch.tanh(u) if self.squashes else u

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        mean, log_std = self(obs)
        return self.in_steps(self.squash(mean + log_std.exp() * noise)), carry

    def feedforward(self) -> Feedforward:
        """The mean action as plain layers; ConfigError if an observation is no vector."""
        require_squashed(self.spec.act)
        *body, head = self.layers()
        assert isinstance(head, torch.nn.Linear)
        mean = torch.nn.Linear(head.in_features, self.size, device="meta")
        mean.weight = torch.nn.Parameter(head.weight[: self.size])
        mean.bias = torch.nn.Parameter(head.bias[: self.size])
        net = torch.nn.Sequential(*body, mean)
        return Feedforward(self.encoder.only_vectors(), self.encoder.norm, net)

    def sample(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Action [n, size] and its log-probability [n], both differentiable."""
        mean, log_std = self(obs)
        u = mean + log_std.exp() * noise
        return self.squash(u), self._density(u, noise, log_std).sum(1)

    def kl(self, obs: Tensors, other: Gaussian) -> Tensor:
        """KL(self || other) of whole chunks, [n], in nats; squashing both does not change it."""
        return normal_kl(*self(obs), *other(obs)).sum(1)

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of actions [n, size], clipped to [-1 + 1e-5, 1 - 1e-5]."""
        mean, log_std = self(obs)
        return self._log_prob(mean, log_std, action).sum(1)

    def _log_prob(self, mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        if self.squashes:
            action = torch.atanh(action.clamp(-1 + 1e-5, 1 - 1e-5))
        return self._density(action, (action - mean) * torch.exp(-log_std), log_std)

    def _density(self, u: Tensor, z: Tensor, log_std: Tensor) -> Tensor:
        """log p of each action element, of `u` that is z standard deviations from its mean."""
        normal = 0.5 * z.square() + log_std + 0.5 * LOG_2PI
        if not self.squashes:
            return -normal
        # log d tanh(u) / du = log(1 - tanh(u)^2); written so, it does not underflow.
        return -(normal + 2 * (math.log(2) - u - functional.softplus(-2 * u)))

    def loss(self, batch: Tensors) -> Tensor:
        """Imitation loss (`imitate`) per action element, averaged over the valid steps, [n]."""
        mean, log_std = self(under(batch, "obs"))
        action = batch["action"].flatten(1)
        if self.config.imitate == "nll":
            error = -self._log_prob(mean, log_std, action)
        else:
            error = (self.squash(mean) - action).square()
        return per_row(error.view_as(batch["action"]), batch["valid"])

    def warmup_policy(self) -> Policy:
        return self.uniform()


def require_squashed(act: Leaf) -> None:
    """ConfigError for an action that a wrapper normalises: it is not squashed by tanh."""
    if act.is_normalized:
        raise ConfigError("plain layers end in tanh, and normalised actions do not")
