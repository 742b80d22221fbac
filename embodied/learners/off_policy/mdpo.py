"""MDPO: mirror descent policy optimisation, off-policy (Tomar et al., 2021): SAC near its own past.

    L_pi = E[ c log pi(a~|s) + (lambda - c) log pi_k(a~|s) - Q(s, a~) ]
         = E[ lambda log pi(a~|s) - Q(s, a~) ] + (c - lambda) E_s[ KL(pi(.|s) || pi_k(.|s)) ]

lambda is SAC's temperature, c = 1 / t_k the weight of log pi. pi_k is a copy of the policy, renewed
every m updates. c = lambda is SAC. Critics are SAC's. Differences from the published code: the KL
is exact instead of sampled; there is no value network (as in SAC of 2018b) and no penalty on the
policy's outputs; the policy maximises the smallest critic and not the first; it explores by its own
noise, where the code acts by the mean.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import sac


@dataclass(frozen=True)
class Config(sac.Config):
    """Settings of MDPO off-policy; lambda is `initial_temperature`, which stays by default."""

    temperature_lr: Fraction = 0.0  # Adam's learning rate of log lambda; 0: lambda stays
    initial_temperature: Positive = 0.2  # lambda at the start, in units of the reward
    c: NonNegative = 1.0  # 1 / t_k: weight of log pi in the policy's loss; lambda: SAC
    refresh: Count = 1000  # m: updates between two renewals of pi_k


class MdpoOffPolicy(sac.Sac):
    """As Sac, with the policy held near its copy `before`."""

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.before = copy.deepcopy(self.policy).requires_grad_(False)  # pi_k
        self.before_params: list[Tensor] = list(self.before.parameters())

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if self.is_due(self.config.refresh):
            with torch.no_grad():
                torch._foreach_copy_(self.before_params, self.actor_params)  # pyright: ignore[reportPrivateImportUsage]
        return super().update(batch)

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        loss, log_prob = super()._actor_loss(batch)
        kl = self.policy.kl(under(batch, "obs"), self.before).mean()
        return loss + (self.config.c - self.alpha) * kl, log_prob

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.before.fit(transitions)
