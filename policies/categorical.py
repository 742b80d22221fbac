"""Categorical: policy for discrete actions, sampled from logits with Gumbel noise.

a = argmax_k (logit_k(o) + g_k), g_k = -log(-log u): a is a sample of softmax(logits) (Gumbel, 1954;
Maddison et al., 2014); without noise it is the most likely action.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import orthogonal, per_row
from embodied.policies.encoded import MlpConfig, MlpPolicy


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of the policy; the actions of a chunk are independent given the observation."""

    head: NonNegative | None = None  # gain of the last layer (0: all equally likely; null: torch's)
    sampled: bool = False  # sample in evaluation too, where the most likely action could loop


class Categorical(MlpPolicy):
    """Categorical policy. Noise [n, chunk, K] is standard Gumbel to explore (`sampled`: always),
    zero for the most likely action."""

    def __init__(self, config: Config, spec: Spec) -> None:
        high = spec.act.high
        if spec.act.dtype != "int64" or spec.act.shape or not isinstance(high, int | float):
            raise ConfigError("this policy needs discrete actions, not continuous ones")
        self.count = int(high) + 1
        super().__init__(config, spec, config.chunk * self.count)
        if config.head is not None:
            orthogonal(self.net, config.head)

    def forward(self, obs: Tensors) -> Tensor:
        """Log-probabilities [n, chunk, K] of all actions."""
        logits = self.net(self.encoder(obs)).view(-1, self.chunk, self.count)
        return functional.log_softmax(logits, 2)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.chunk, self.count, device=self.encoder.norm.mean.device)
        return noise.exponential_().log_().neg_() if explore or self.config.sampled else noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return (self(obs) + noise).argmax(2), carry

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats), [n] each, of actions [n] or [n, k] (the first k of
        the chunk)."""
        played = 1 if action.ndim == 1 else action.shape[1]
        logs = self(obs)[:, :played]
        chosen = logs.gather(2, action.long().view(-1, played, 1))
        return chosen.sum((1, 2)), -(logs.exp() * logs).sum((1, 2))

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of given actions ([n] or [n, chunk], int64), differentiable."""
        return self._log_prob_of(self(obs), action).sum(1)

    def entropy(self, obs: Tensors) -> Tensor:
        """Entropy [n] in nats, summed over the chunk, differentiable."""
        logs = self(obs)
        return -(logs.exp() * logs).sum((1, 2))

    def loss(self, batch: Tensors) -> Tensor:
        """Cross-entropy, averaged over the valid steps, [n]."""
        logs = self(under(batch, "obs"))
        return per_row(-self._log_prob_of(logs, batch["action"])[..., None], batch["valid"])

    def _log_prob_of(self, logs: Tensor, action: Tensor) -> Tensor:
        return logs.gather(2, action.long().view(-1, self.chunk, 1)).squeeze(2)

    def warmup_policy(self) -> Policy:
        """A policy with uniform actions."""
        return self.uniform()
