"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al., 2018).

    a~  = clip(mu'(s') + clip(sigma e, -c, c), -1, 1),   e ~ N(0, I)
    y   = r + d min_i Q'_i(s', a~)
    L_Q = sum_i E (Q_i(s, a) - y)^2,   L_mu = -E Q_1(s, mu(s))

The policy and its target are updated every `policy_delay` critic updates.

FastTD3 (Seo et al., 2025), for many parallel environments: critics predict a distribution over
`atoms` and are trained by cross entropy on that of the target critic with the smaller mean; the
policy maximises the smaller mean, and its exploration noise differs between environments (the
policy's `std_range`). Differences from the published code: observations are normalised once
(`data.normalize`), not by running statistics; Adam without AdamW's weight decay; FP32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative, Number, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import DelayedActorCritic, OffPolicyConfig
from embodied.learners.critics import ensemble, support_of
from embodied.learners.learner import frozen, soft_update
from embodied.policies.deterministic import Deterministic


@dataclass(frozen=True)
class Config(OffPolicyConfig):
    hidden: tuple[Units, ...] = (256, 256)  # units of the critics' hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the critics
    layer_norm: bool = False  # layer normalisation in the critics
    weight_decay: NonNegative = 0.0  # L2 penalty, added to the gradients
    target_noise: NonNegative = 0.2  # std on target actions, in units of half the action range
    noise_clip: NonNegative = 0.5  # largest size of that noise, in the same unit
    policy_delay: Count = 2  # updates per step of the policy
    target_delay: Count = 2  # updates per step of the target critics
    actor_start: CountOrZero = 0  # updates before the policy's first step
    critic_obs: tuple[str, ...] | None = None  # observations of the critics; null: all
    atoms: CountOrZero = 0  # atoms of a categorical critic, 2 or more; 0: one number
    values: tuple[Number, Number] = (-10.0, 10.0)  # lowest and highest atom, as a return


class Td3(DelayedActorCritic):
    """`update` is one critic step and, every `policy_delay` updates, one policy step on the same
    transitions."""

    data = "off_policy"
    usual_policy = "deterministic"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, Deterministic):
            raise ConfigError("this learner needs a deterministic policy: policy=deterministic")
        out, obs = max(config.atoms, 1), config.critic_obs
        critic = ensemble(config, spec, policy.size, config.activation, out, n=2, obs=obs)
        decay = config.weight_decay
        super().__init__(config, policy, critic, policy.parameters(), weight_decay=decay)
        self.support = support_of(config)
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.target_actor_params: list[Tensor] = list(self.target_policy.parameters())

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        act = self.is_due(self.config.policy_delay) and self.updates > self.config.actor_start
        follows = self.is_due(self.config.target_delay)
        return self.with_last_actor(self._step(follows, act, batch))

    def _step(self, follows: bool, act: bool, batch: Tensors) -> dict[str, Tensor]:
        metrics = self.critic_step(batch)
        if act:
            metrics |= self._actor_step(batch)
        if follows:
            soft_update(self.target_params, self.critic_params, self.config.tau)
        if act:
            soft_update(self.target_actor_params, self.actor_params, self.config.tau)
        return metrics

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        action = self.target_policy(following)
        noise = self.target_noise(action)
        q = self.target(following, noise.add_(action).clamp_(-1, 1))
        if self.support is None:
            return torch.addcmul(reward, discount, q.amin(0))
        return self.support.back_up(self.support.lowest(q), reward, discount)

    def target_noise(self, action: Tensor) -> Tensor:
        """Clipped noise for the target policy's `action`."""
        noise = torch.randn_like(action).mul_(self.config.target_noise)
        return noise.clamp_(-self.config.noise_clip, self.config.noise_clip)

    def _actor_step(self, batch: Tensors) -> dict[str, Tensor]:
        with frozen(self.critic_params):
            loss = self._actor_loss(batch)
            self.descend("actor", loss)
        return {"actor_loss": loss.detach()}

    def _actor_loss(self, batch: Tensors) -> Tensor:
        obs = under(batch, "obs")
        action = self.policy(obs)
        first = 1 if self.support is None else None
        value = self.values(self.critic(obs, action, first)).amin(0)
        return -(value + self.prior(obs, action)).mean()

    def prior(self, obs: Tensors, action: Tensor) -> Tensor | float:
        """lambda log rho(a|s), [N], of a prior rho over actions, added to values in the policy's
        loss. A hook: none by default."""
        return 0.0
