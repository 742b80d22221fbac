"""Q-chunking: values of action chunks, proposed by a BC flow policy (QC; Li et al., 2025).

A transition holds a chunk a of h steps: R its discounted reward, d = gamma^h (0 after a
termination).

    a'   = argmax_{i <= N} Q(s', ODE(s', z_i)),   by the trained critics
    y    = R + d mean_i Q'_i(s', a'),              by the target critics
    L_Q  = sum_i E (Q_i(s, a) - y)^2,             L_pi = L_flow, on all transitions

Acting uses the same argmax. Chunked actions give unbiased h-step backups and temporally coherent
exploration. L_pi counts the executed steps of a chunk. Differences from the published code: online,
a transition begins where a decision did (they begin at any step); a chunk that the end of an
episode cuts short trains the critics too, with its true return and the rest of its plan, as in
fql.py (they drop it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.actor_critic import ActorCritic, OffPolicyConfig
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.learner import soft_update
from embodied.policies.wrappers.best_of_n import BestOfN, select_by_q


@dataclass(frozen=True)
class Config(OffPolicyConfig):
    """Settings of Q-chunking. The numbers of critics and candidates are settings of the policy."""


class QChunking(ActorCritic):
    """`update` is one critic step and one BC step of the base policy, on the same transitions."""

    data = "offline"
    uses_executed_steps = True
    usual_policy = "best_of_n"

    def __init__(self, config: Config, policy: Policy) -> None:
        if type(policy) is not BestOfN:
            raise ConfigError("learner=qchunking needs candidate chunks: policy=best_of_n")
        policy.requires_grad_(True)
        super().__init__(config, policy, policy.critic, policy.base.parameters())

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = self.critic_step(batch)
        clone = self._actor_loss(batch)
        self.descend("actor", clone)
        soft_update(self.target_params, self.critic_params, self.config.tau)
        return metrics | {"clone_loss": clone.detach()}

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        proposals = self.policy.proposals(
            following, self.policy.sample_noise(reward.shape[0], True)
        )
        action, _ = select_by_q(self.policy.judge, following, proposals)
        q = self.target(following, action)
        return torch.addcmul(reward, discount, q.mean(0))

    def _actor_loss(self, batch: Tensors) -> Tensor:
        return self.policy.base.loss(behaviour(batch, self.policy)).mean()
