"""FQL: flow Q-learning (Park et al., 2025), offline and online.

A flow policy v is trained by imitation; a one-step policy mu is distilled from it and maximises Q.
No gradient passes through the flow's integration. With z, z' ~ N(0, I):

    y    = r + d agg_i Q'_i(s', clip mu(s', z'))
    L_Q  = sum_i E (Q_i(s, a) - y)^2
    L_pi = L_flow(v) + alpha |mu(s, z) - sg ODE_v(s, z)|^2 - lambda mean_i Q_i(s, clip mu(s, z))

lambda = 1, or 1 / sg mean |Q|, which makes alpha independent of the reward scale. Each transition
has its own discount d; actions may be chunks, of which the flow imitates the steps that were
executed. Differences from the published code: a chunk that the end of an episode cuts short trains
the critics too, with its true return and the rest of its plan (they drop it), because online a
chunk that ends with the success may be the only one that is rewarded; the one-step policy's
default network is smaller (three layers of 256 against four of 512).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import ActorCritic, OffPolicyConfig
from embodied.learners.critics import Critic, CriticConfig, ensemble
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.learner import frozen, soft_update
from embodied.policies.generative.one_step import OneStep


@dataclass(frozen=True)
class Config(OffPolicyConfig, CriticConfig):
    """Settings of FQL. `alpha` matters most: 0.03 to 10 with `normalize_q`, 10 to 1,000 without."""

    alpha: NonNegative = 1.0  # weight of the distillation
    normalize_q: bool = True  # divide the value by mean |Q|: alpha without the reward's scale
    aggregate: Literal["mean", "min"] = "mean"  # of the target critics
    layer_norm: bool = True  # layer normalisation in the critics


class Fql(ActorCritic):
    """`update` is one critic step and one step of the flow and the one-step policy, on the same
    transitions."""

    data = "offline"
    uses_executed_steps = True
    usual_policy = "one_step"
    policy: OneStep  # pyright: ignore[reportIncompatibleVariableOverride]
    critic: Critic
    target: Critic

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, OneStep):
            raise ConfigError("learner=fql needs a one-step policy: policy=one_step")
        critic = ensemble(config, spec, policy.size)
        super().__init__(config, policy, critic, policy.requires_grad_(True).parameters())

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = self.critic_step(batch)
        with frozen(self.critic_params):
            flow, distil, value = self._actor_loss(batch)
            self.descend("actor", flow + self.config.alpha * distil + value)
        soft_update(self.target_params, self.critic_params, self.config.tau)
        parts = {"flow_loss": flow, "distil_loss": distil, "value_loss": value}
        return metrics | {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        noise = self.policy.sample_noise(reward.shape[0], True)
        q = self.target(following, self.policy(following, noise).clamp(-1, 1))
        value = q.mean(0) if self.config.aggregate == "mean" else q.amin(0)
        return torch.addcmul(reward, discount, value)

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms of L_pi, without alpha."""
        obs = under(batch, "obs")
        noise = self.policy.sample_noise(batch["reward"].shape[0], True)
        action = self.policy(obs, noise)
        q = self.critic(obs, action.clamp(-1, 1)).mean(0)
        return (
            self.policy.flow.loss(behaviour(batch, self.policy)).mean(),
            (action - self.policy.teacher(obs, noise)).square().mean(),
            value_loss(q, self.config.normalize_q),
        )


def value_loss(q: Tensor, normalize: bool) -> Tensor:
    """-mean Q, divided by mean |Q| if `normalize`; `q` [N]."""
    scale = 1 / q.detach().abs().mean().clamp(min=1e-6) if normalize else 1.0
    return -scale * q.mean()
