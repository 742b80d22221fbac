"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al., 2018).

    a~  = clip(mu'(s') + clip(sigma e, -c, c), -1, 1),   e ~ N(0, I)
    y   = r + d min_i Q'_i(s', a~)
    L_Q = sum_i E (Q_i(s, a) - y)^2,   L_mu = -E Q_1(s, mu(s))

The policy and its target are updated every `policy_delay` critic updates. Each transition has its
own discount d (gamma^k, 0 after a termination), so action chunks and n-step returns need no special
code here.

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

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import DelayedActorCritic
from embodied.learners.critics import Critic, critic_loss
from embodied.learners.distributional import Support, cross_entropy
from embodied.learners.gradient_learner import frozen, soft_update
from embodied.learners.off_policy.native_td3 import NativeTd3, obstacle
from embodied.nn.optim import Adam
from embodied.policies.deterministic import Deterministic


@dataclass(frozen=True)
class Config:
    """`policy_delay`: the policy is trained at every such update (one critic step each) after the
    first `actor_start`; `target_delay`: the same for the target critics.

    `weight_decay`: L2, added to the gradient; `target_noise`, `noise_clip`: in units of half the
    action range; `critic_obs`: the critics' observations (None: all); `atoms` > 0: categorical
    critics with atoms spaced over `values` (lowest, highest return). `compile` and `cuda_graph`
    change speed only and are for GPUs."""

    batch_size: int = 256
    gamma: float = 0.99
    n_step: int = 1
    tau: float = 0.005
    hidden: tuple[int, ...] = (256, 256)
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"
    layer_norm: bool = False
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    weight_decay: float = 0.0
    target_noise: float = 0.2
    noise_clip: float = 0.5
    policy_delay: int = 2
    target_delay: int = 2
    actor_start: int = 0
    critic_obs: tuple[str, ...] | None = None
    atoms: int = 0
    values: tuple[float, float] = (-10.0, 10.0)
    compile: bool = False
    cuda_graph: bool = False


class Td3(DelayedActorCritic):
    """`update` is one critic step and, every `policy_delay` updates, one policy step on the same
    transitions."""

    data = "off_policy"
    usual_policy = "deterministic"
    policy: Deterministic  # pyright: ignore[reportIncompatibleVariableOverride]
    target_policy: Deterministic
    critic: Critic
    target: Critic

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__()
        if not isinstance(policy, Deterministic):
            raise ConfigError("this learner needs a deterministic policy: policy=deterministic")
        if min(config.policy_delay, config.target_delay) < 1:
            raise ConfigError("policy_delay and target_delay must be at least 1 (every update)")
        self.config, self.policy = config, policy
        self.batch_size, self.gamma, self.n_step = config.batch_size, config.gamma, config.n_step
        critic = Critic(
            spec,
            policy.size,
            2,
            config.hidden,
            layer_norm=config.layer_norm,
            activation=config.activation,
            obs=config.critic_obs,
            out=max(config.atoms, 1),
        )
        self.add_critic(critic)
        self.support = Support(*config.values, config.atoms) if config.atoms else None
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.actor_params: list[Tensor] = list(policy.parameters())
        self.target_actor_params: list[Tensor] = list(self.target_policy.parameters())
        decay = config.weight_decay
        self.optims = {
            "critic": Adam(self.critic_params, config.critic_lr, weight_decay=decay),
            "actor": Adam(self.actor_params, config.actor_lr, weight_decay=decay),
        }
        self.count_updates(KINDS)
        self.native_step = NativeTd3()

    def native_obstacle(self) -> str | None:
        return obstacle(self) if type(self) is Td3 else ""

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        due = self.updates % self.config.policy_delay == 0
        act = due and self.updates > self.config.actor_start
        follows = self.updates % self.config.target_delay == 0
        return self.delayed((follows, act), batch, ["actor_loss"])

    def _step(self, follows: bool, act: bool, batch: Tensors) -> dict[str, Tensor]:
        if self.native and type(self) is Td3 and self.native_step.can_update(self):
            return self.native_step.update(self, follows, act, batch)
        metrics = self.critic_step(batch)
        if act:
            metrics |= self._actor_step(batch)
        if follows:
            soft_update(self.target_params, self.critic_params, self.config.tau)
        if act:
            soft_update(self.target_actor_params, self.actor_params, self.config.tau)
        return metrics

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        q = self.critic(under(batch, "obs"), batch["action"])
        following = under(batch, "next_obs")
        backup = self._backup(batch["reward"], batch["discount"], following)
        if self.support is None:
            return critic_loss(q, backup), q.detach().mean()
        return cross_entropy(q, backup), self.support.mean(q.detach()).mean()

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
            loss = self._actor_loss_fn(batch)
            self.descend("actor", loss)
        return {"actor_loss": loss.detach()}

    def _actor_loss(self, batch: Tensors) -> Tensor:
        obs = under(batch, "obs")
        if self.support is None:
            return -self.critic(obs, self.policy(obs), 1).mean()
        return -self.support.mean(self.critic(obs, self.policy(obs))).amin(0).mean()

    def fit(self, rows: Tensors) -> None:
        for part in (self.policy, self.target_policy, self.critic.encoder, self.target.encoder):
            part.fit(rows)


KINDS = [(follows, act) for follows in (False, True) for act in (False, True)]
