"""DiagonalGaussian: Gaussian policy with a state-independent standard deviation.

The policy of PPO (Schulman et al., 2017): u ~ N(mean(o), diag(exp(2 log_std))); the environment
gets clip(u, -1, 1). The density and the learner's stored action are those of u, before clipping.
Orthogonal weights with a small last layer give a mean near 0 (Andrychowicz et al., 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from embodied.core.bounds import NonNegative, Number, Units
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.encoded import DensityPolicy, MlpConfig, require_continuous

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of a Gaussian policy whose std does not depend on the observation."""

    hidden: tuple[Units, ...] = (64, 64)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the hidden layers
    log_std: Number = 0.0  # initial log std of all elements, of half the action range
    learn_std: bool = True  # train the std
    head: NonNegative = 0.01  # gain of the last layer
    zero_head: bool = False  # the initial mean is exactly 0


class DiagonalGaussian(DensityPolicy):
    """Noise [n, chunk * A] is standard normal to explore, zero for the mean action."""

    squashed = False

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, config.chunk * spec.act.size)
        self.begin_orthogonal(0.0 if config.zero_head else config.head)
        start = torch.full((self.size,), config.log_std)
        self.log_std = nn.Parameter(start, requires_grad=config.learn_std)

    def forward(self, obs: Tensors) -> Tensor:
        """Mean [n, size], not clipped."""
        return self.net(self.encoder(obs))

    def gaussian(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """See `policies.abilities.HasGaussian`."""
        mean = self(obs)
        return mean, self.log_std.expand_as(mean)

    def initial(self, n: int) -> Tensors:
        return {"row/action": torch.zeros(n, self.size, device=self.log_std.device)}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = torch.addcmul(self(obs), self.log_std.exp(), noise)
        return self.in_steps(self.spec.act.bounded(u)), {**carry, "row/action": u}

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """As in DensityPolicy, of unclipped actions."""
        mean, log_std = self(obs), self.log_std
        if (played := action.shape[1]) < self.size:
            mean, log_std = mean[:, :played], log_std[:played]
        z = (action - mean) * torch.exp(-log_std)
        total = log_std.sum() + 0.5 * LOG_2PI * action.shape[1]
        entropy = total + 0.5 * action.shape[1]
        return -0.5 * z.square().sum(1) - total, entropy.expand(len(action))

    def kl(self, obs: Tensors, other: DiagonalGaussian) -> Tensor:
        """KL(self || other) of whole chunks at each observation, [n], in nats."""
        return normal_kl(self(obs), self.log_std, other(obs), other.log_std).sum(1)

    def entropy(self, obs: Tensors) -> Tensor:
        """Entropy [n] in nats, the same for every observation."""
        n = next(iter(obs.values())).shape[0]
        return (self.log_std.sum() + 0.5 * self.size * (LOG_2PI + 1)).expand(n)


def normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(other mean, other std^2)), elementwise, in nats."""
    log_ratio = log_std - other_log_std
    z = (mean - other_mean) * torch.exp(-other_log_std)
    return 0.5 * ((2 * log_ratio).exp() + z.square() - 1) - log_ratio
