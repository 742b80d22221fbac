"""FlashSAC: soft actor-critic with bounded norms of networks, values and returns.

Kim et al., "FlashSAC: fast and stable off-policy reinforcement learning for high-dimensional robot
control" (2026): normalised residual blocks, weights of unit norm, a categorical critic, rewards
scaled to the critic's support, temporally correlated exploration noise, few updates on large
batches.

    p   = distribution of (r / s + d (z - alpha log pi(a'|s'))),   z from target critic j(s', a')
    L_Q = sum_i CE(p, Z_i(s, a)),   j: the target critic of the smaller mean
    L_pi = E (alpha log pi(a~|s) - min_i E Z_i(s, a~))

The critics evaluate (s, a) and (s', a') in one pass, so that batch normalisation uses statistics of
both (CrossQ). The policy and the temperature are updated at every second update. The target entropy
is that of a normal distribution with std `target_std`: log(target_std sqrt(2 pi e)) per action
element.

Differences from the paper: s is the running maximum over batches of headroom E|r| / (1 - E d) /
high, an estimate of the return that needs only transitions (the authors track episode returns);
critics are initialised to a normal distribution with mean 0 and std high / 5, not uniform, which
halves the noise of the first thousand updates; learning rates are constant; no mixed precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, Count, Few, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import DelayedActorCritic, SoftConfig, actor_loss, draw
from embodied.learners.critics import Support, cross_entropy
from embodied.learners.learner import soft_update
from embodied.policies.block_gaussian import BlockGaussian, Blocks
from embodied.policies.networks.encoders import Encoder


@dataclass(frozen=True)
class Config(SoftConfig):
    batch_size: Count = 512  # transitions per critic step
    tau: PositiveFraction = 0.01  # step of the target critics towards the trained ones
    width: Units = 256  # units of the critics' residual blocks
    depth: Few = 2  # residual blocks of each critic
    expansion: Count = 4  # hidden units of a block per unit of `width`
    atoms: Annotated[int, Bound(2)] = 101  # atoms of the critics, from -`high` to `high`
    high: Positive = 5.0  # upper end of the support, as a scaled return
    headroom: Positive = 2.0  # upper end of the support in units of the mean return
    scale: Positive | None = None  # s, by which rewards are divided; null: estimated
    initial_temperature: Positive = 0.01  # alpha at the start, in units of the scaled reward
    target_std: Positive = 0.15  # std of the normal distribution with the target entropy
    policy_delay: Count = 2  # updates per step of the policy and the temperature


class BlockCritic(nn.Module):
    """Categorical critics: logits [n, N, atoms] of the return for observations and actions
    [N, size]; uses all observations."""

    def __init__(self, spec: Spec, size: int, n: int, config: Config) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, asymmetric=True)
        self.net = Blocks(
            n, self.encoder.size + size, config.width, config.depth, config.atoms, config.expansion
        )
        with torch.no_grad():
            z = torch.linspace(-5, 5, config.atoms)  # in units of the standard deviation
            self.net.bias.copy_((-z.square() / 2).expand_as(self.net.bias))

    def forward(self, obs: Tensors, action: Tensor, fresh: bool) -> Tensor:
        return self.net(torch.cat([self.encoder(obs), action], 1), fresh)


class Flashsac(DelayedActorCritic):
    """`update` is one critic step and, every `policy_delay` updates, one policy step on the same
    transitions."""

    data = "off_policy"
    usual_policy = "block_gaussian"
    scale: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, BlockGaussian):
            raise ConfigError("learner=flashsac needs policy=block_gaussian")
        critic = BlockCritic(spec, policy.size, 2, config)
        entropy = policy.size * math.log(config.target_std * math.sqrt(2 * math.pi * math.e))
        super().__init__(config, policy, critic, policy.parameters(), entropy)
        self.support = Support(-config.high, config.high, config.atoms)
        start = 0.0 if config.scale is None else config.scale  # 0 until the first batch
        self.register_buffer("scale", torch.tensor(start))

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        return self.with_last_actor(self._step(self.is_due(self.config.policy_delay), batch))

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        self._rescale(batch)
        metrics = self.critic_step(batch)
        self.critic.net.project()
        metrics["scale"] = self.scale.clone()
        if act:
            metrics |= self.soft_actor_step(batch)
            self.policy.project()
        soft_update(self.target_params, self.critic_params, self.config.tau)
        return metrics

    @torch.no_grad()
    def _rescale(self, batch: Tensors) -> None:
        if self.config.scale is None:
            steps = 1 / (1 - batch["discount"].mean()).clamp(min=1e-4)
            seen = self.config.headroom * batch["reward"].abs().mean() * steps / self.config.high
            self.scale.copy_(torch.maximum(self.scale, seen))

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        n = len(batch["reward"])
        following = under(batch, "next_obs")
        with torch.no_grad():
            action, log_prob = draw(self.policy, following)
        obs = {
            key: torch.cat([value, following[key]]) for key, value in under(batch, "obs").items()
        }
        actions = torch.cat([batch["action"], action])
        target = self._backup(batch["reward"], batch["discount"], log_prob, obs, actions)
        logits = self.critic(obs, actions, fresh=True)[:, :n]
        q = self.support.mean(logits.detach()).mean() * self.scale
        return cross_entropy(logits, target) + self.critic_terms(batch, logits), q

    @torch.no_grad()
    def _backup(
        self, reward: Tensor, discount: Tensor, log_prob: Tensor, obs: Tensors, actions: Tensor
    ) -> Tensor:
        """The critics' target distribution [N, K]; `obs` and `actions` hold (s, a) in their first
        half and (s', a') in the second."""
        logits = self.target(obs, actions, fresh=True)[:, len(reward) :]
        entropy = self.log_alpha.exp() * log_prob
        reward = reward / self.scale.clamp(min=1e-6) - discount * entropy
        return self.support.back_up(self.support.lowest(logits), reward, discount)

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action, log_prob = draw(self.policy, obs)
        q = self.support.mean(self.critic(obs, action, fresh=False)).amin(0)
        return actor_loss(q, log_prob, self.alpha), log_prob.detach()
