"""MEX: maximize to explore, model-free (Liu et al., 2023): TD3 with optimistic critics.

One objective in place of a bonus: a value function that fits the data and promises much.

    L_Q = sum_i E (Q_i(s, a) - y)^2 - eta G
    G = sum_i E [ Q_i(s, mu(s)) - log sum_c exp Q_i(s, c) ],   c in { a, mu(s'), u }     "policy"
    G = sum_i E Q_i(s, a)                                                                "data"

u is uniform in [-1, 1]^A. "policy" raises the values of what the policy would do above those of
recorded, neighbouring and random actions: the opposite of CQL's term. With "data" alone every value
settles eta / 2 above its target, so eta is in units of the return. Actions have no gradients;
policy and targets are TD3's, which eta = 0 equals bit for bit.

Differences from the published code: the recorded action's value in the sum is each critic's own
(theirs: the first critic's for both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import td3


@dataclass(frozen=True)
class Config(td3.Config):
    """Settings of MEX: those of TD3, and of its optimism."""

    optimism: NonNegative = 5e-3  # eta, in units of the return; 0: TD3
    raised: Literal["policy", "data"] = "policy"  # whose values G raises


class Mex(td3.Td3):
    """As Td3, with the term `-optimism * G` in the critics' loss; the metric `promise` is G."""

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.promise = torch.zeros(())

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor | float:
        self.promise = q.new_zeros(())
        if not self.config.optimism:
            return 0.0
        known = self.values(q)
        if self.config.raised == "data":
            promise = known.mean(1).sum()
        else:
            others = self.values(self.critic.each(under(batch, "obs"), self._proposals(batch)))
            rivals = torch.cat([known[..., None], others[..., 1:]], 2)
            promise = promised(others[..., 0], rivals)
        self.promise = promise.detach()
        return -self.config.optimism * promise

    def critic_step(self, batch: Tensors, tau: float = 0.0) -> Tensors:
        metrics = super().critic_step(batch, tau)
        return {**metrics, "promise": self.promise}

    @torch.no_grad()
    def _proposals(self, batch: Tensors) -> Tensor:
        """Actions [N, 3, size]: the policy's, the policy's at the next state, and uniform ones."""
        own = self.policy(under(batch, "obs"))
        following = self.policy(under(batch, "next_obs"))
        uniform = torch.rand_like(own).mul_(2).sub_(1)
        return torch.stack([own, following, uniform], 1)


def promised(own: Tensor, rivals: Tensor) -> Tensor:
    """Sum over critics of mean(own - logsumexp rivals); `own` [E, N], `rivals` [E, N, C]."""
    return (own - rivals.logsumexp(2)).mean(1).sum()
