"""SAC: soft actor-critic (Haarnoja et al., 2018), with the options of REDQ and RLPD.

REDQ (Chen et al., 2021): n critics, a random subset of them in the target, many updates per step.
RLPD (Ball et al., 2023): LayerNorm, half of every batch from demonstrations.

    y   = r + d (min_{i in M} Q'_i(s', a') - alpha log pi(a'|s')),   a' ~ pi(.|s')
    L_Q = sum_i E (Q_i(s, a) - y)^2
    L_pi = E (alpha log pi(a~|s) - Q(s, a~)),   L_alpha = -alpha E (log pi(a~|s) + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Number
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import DelayedActorCritic, SoftConfig, actor_loss, draw
from embodied.learners.critics import CriticConfig, critic_loss, ensemble
from embodied.policies.gaussian import Gaussian


@dataclass(frozen=True)
class Config(SoftConfig, CriticConfig):
    utd: Count = 1  # critic steps per update, each on its own `batch_size` transitions
    subset: Count = 2  # critics, drawn at random, whose minimum is the target (REDQ)
    target_entropy: Number = -1.0  # entropy that alpha is tuned to, per action element
    entropy_in_backup: bool = True  # whether the critics' target has the entropy bonus
    actor_objective: Literal["min", "mean"] = "min"  # of the critics; the policy maximises it
    extractor: str | None = None  # class of the critics' Encoder in place of the usual one
    actor_start: CountOrZero = 0  # updates before the first step of policy and temperature


class Sac(DelayedActorCritic):
    """`update` takes utd * batch_size transitions: utd critic steps on slices, one actor step."""

    data = "off_policy"
    usual_policy = "gaussian"
    priority: Tensor | None = None

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, Gaussian):
            raise ConfigError("this learner needs a policy with log-probabilities: policy=gaussian")
        if not 1 <= config.subset <= config.critics:
            raise ConfigError(f"subset={config.subset} is not in 1..{config.critics} (critics)")
        critic = ensemble(config, spec, policy.size, extractor=config.extractor)
        entropy = config.target_entropy * policy.size
        super().__init__(config, policy, critic, policy.parameters(), entropy)
        self.batch_size = config.utd * config.batch_size

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        return self.with_last_actor(self._step(self.updates > self.config.actor_start, batch))

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        metrics: Tensors = {}
        self.td_errors: list[Tensor] = []  # of each slice
        for part in self.slices(batch, self.config.batch_size):
            metrics |= self.critic_step(part, self.config.tau)
        if self.td_errors:
            self.priority = torch.cat(self.td_errors)
        return metrics | (self.soft_actor_step(part) if act else {})

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        q = self.critic(under(batch, "obs"), batch["action"])
        backup = self._backup(batch["reward"], batch["discount"], under(batch, "next_obs"))
        loss = critic_loss(q, backup, batch.get("weight")) + self.critic_terms(batch, q)
        if "weight" in batch:
            self.td_errors.append((q.detach() - backup).abs().mean(0))
        return loss, q.detach().mean()

    def drawn(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Actions [N, size], and what the temperature weighs, [N]: log-densities. A hook."""
        return draw(self.policy, obs)

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        action, log_prob = self.drawn(following)
        q = self.target(following, action)
        if self.config.subset < self.config.critics:
            # Not randperm: it synchronises, and a CUDA graph would replay a single sample.
            scores = torch.rand(self.config.critics, device=q.device)
            q = q.index_select(0, scores.topk(self.config.subset).indices)
        value = q.amin(0)
        if self.config.entropy_in_backup:
            value = value - self.log_alpha.exp() * log_prob + self.prior(following, action)
        return reward + discount * value

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action, log_prob = self.drawn(obs)
        q = self.critic(obs, action)
        value = q.amin(0) if self.config.actor_objective == "min" else q.mean(0)
        value = value + self.prior(obs, action)
        return actor_loss(value, log_prob, self.alpha), log_prob.detach()

    def prior(self, obs: Tensors, action: Tensor) -> Tensor | float:
        """lambda log rho(a|s), [N], of a prior rho over actions, added to values in the policy's
        loss and, with `entropy_in_backup`, in the critics' target. A hook: none by default."""
        return 0.0
