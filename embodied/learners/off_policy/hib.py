"""HIB: a history encoder with an information bottleneck, beside RL (He et al., 2024).

The policy sees the present o and a code z of the past h, which is to keep what h says about the
privileged state e (known in simulation only) and to forget the rest:

    L = L_RL(pi(o, z)) + lambda ( beta KL(q(z|h) || N(0, I)) - E_q(z|h) log p(e|z) ),  p Gaussian

with the gradient of RL through z too. Here L_RL is that of TD3, whose critic sees the privileged
state. The two parts have an Adam each, so that lambda is a ratio of learning rates: in one sum, the
gradient of RL, which grows with the values, hid the other one. Further differences from the paper:
the policy gets the mean of z in training too; TD3, not SAC or PPO; the encoder is an MLP; p(e|z)
has one learned variance per element of e.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import NonNegative, PositiveFraction
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import td3
from embodied.nn.networks import mlp
from embodied.nn.optim import Adam
from embodied.policies.networks.history import CODE, Known, encoder_of


@dataclass(frozen=True)
class Config(td3.Config):
    """Settings of TD3 and of the bottleneck."""

    code_lr: PositiveFraction = 1e-3  # Adam's learning rate of the bottleneck
    beta: NonNegative = 1e-3  # weight of the divergence from N(0, I) in the bottleneck


class Hib(td3.Td3):
    """TD3 on a policy with `PastEncoder`; the bottleneck is part of the policy's step."""

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.known = Known(spec.obs)
        self.tell = mlp(CODE, (64,), self.known.size)
        self.log_std = nn.Parameter(torch.zeros(self.known.size))
        code = encoder_of(policy).coder.parameters()
        own = [*code, *self.tell.parameters(), self.log_std]
        self.optims["bottleneck"] = Adam(own, config.code_lr)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.known.fit(transitions)

    def _actor_step(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = super()._actor_step(batch)
        obs = under(batch, "obs")
        noise = torch.randn(len(batch["reward"]), CODE, device=batch["reward"].device)
        rate, error, predicted = self.bottleneck(obs, noise)
        self.descend("bottleneck", self.config.beta * rate + error)
        found = {"rate": rate, "error": error, "predicted": predicted}
        return metrics | {name: value.detach() for name, value in found.items()}

    def bottleneck(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean KL(q(z|h) || N(0, I)), mean -log p(e|z) (without its constant) at z = mu + sigma
        `noise` [n, CODE], and the share of the variance of e that z tells; 0-d each."""
        mean, std = encoder_of(self.policy).posterior(obs)
        target = self.known(obs)
        wrong = target - self.tell(mean + std * noise)
        error = (0.5 * (wrong / self.log_std.exp()).square() + self.log_std).sum(1).mean()
        predicted = 1 - wrong.square().mean() / target.var(0, correction=0).mean().clamp(min=1e-6)
        return divergence(mean, std).mean(), error, predicted


def divergence(mean: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, diag std^2) || N(0, I)) [n]: sum (mean^2 + std^2 - 1) / 2 - log std."""
    return ((mean.square() + std.square() - 1) / 2 - std.log()).sum(1)
