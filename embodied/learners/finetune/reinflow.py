"""ReinFlow: PPO on the Euler steps of a flow policy with learned noise (Zhang et al., 2025).

With learned noise on each of K Euler steps (embodied.policies.denoising_mdp.noisy_flow), the chain
x_0 .. x_K has an exact density. Each decision has one probability ratio, that of its whole chain:

    l     = (log N(x_0; 0, I) + sum_k log N(x_{k+1}; mean_k, std_k)) / ((K + 1) elements)
    rho   = exp(l - l_old)
    L     = PPO's, with the entropy of the chain, divided likewise,  + w |ODE(z) - ODE_base(z)|^2

The division makes the clip range and the entropy weight independent of K and the chunk length.
`narrow`: the noise's upper bound is constant for the share `hold` of the run, then decreases along
a cosine by 0.3 of the distance to the lower bound. After training the flow acts without noise.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from torch import Tensor

from embodied.core.bounds import Bound, NonNegative, Number
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.finetune import ppo_on_chain
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow

FALL = 0.3  # of the way from the upper bound of the noise to the lower


@dataclass(frozen=True)
class Config(ppo_on_chain.Config):
    """Settings of ReinFlow. The authors' `limits` are -1 and 1, which noise below 0.05 exceeds."""

    entropy: NonNegative = 0.03  # weight of the entropy bonus
    limits: tuple[Number, Number] = (-5.0, 5.0)  # bounds of a chain's log-density
    stay: NonNegative = 0.0  # w: weight of the squared distance to the base's noise-free actions
    narrow: bool = False  # anneal the upper bound of the noise
    hold: Annotated[float, Bound(0.0, below=1.0)] = 0.35  # share of the run before annealing


class Reinflow(ppo_on_chain.PpoOnChain):
    """ReinFlow: PPO with one probability ratio per denoising chain."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, config: Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        super().__init__(config, policy, spec, run)
        if not isinstance(policy, NoisyFlow):
            raise ConfigError("learner=reinflow needs policy=noisy_flow (or finetune=reinflow)")
        if config.narrow and not run.decisions:
            raise ConfigError("narrow=true anneals over the run: it needs the length of the run")
        self.clone = copy.deepcopy(policy.inner).requires_grad_(False) if config.stay else None

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = super().update(batch)
        if self.config.narrow:  # here, because noise may change only between batches
            bound = 1 - FALL * fallen(self.done / self.total, self.config.hold)
            cast(NoisyFlow, self.policy).narrow(bound)
        return metrics

    def _evaluate_actions(self, minibatch: Tensors) -> tuple[Tensor, Tensor]:
        log_prob, entropy = self.policy.evaluate_actions(
            under(minibatch, "obs"), minibatch["action"], self.part
        )
        return log_prob.clamp(*self.config.limits), entropy

    def _loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super()._loss(minibatch)
        if self.clone is None:
            return loss, metrics
        left = self.left(under(minibatch, "obs"), torch.randn_like(minibatch["action"][:, 0]))
        return loss + self.config.stay * left, metrics | {"left_clone": left.detach()}

    def left(self, obs: Tensors, z: Tensor) -> Tensor:
        """Squared distance [n] of the flow's actions to the base policy's at the same noise `z`."""
        assert self.clone is not None, "stay > 0 needs the base policy"
        apart = self.policy.inner.act(obs, {}, z)[0] - self.clone.act(obs, {}, z)[0]
        return apart.square().mean()


def fallen(progress: float, hold: float) -> float:
    """0 for `hold` of the run, then along a cosine to 1 at its end."""
    past = min(max(progress - hold, 0.0) / (1 - hold), 1.0)
    return 0.5 - 0.5 * math.cos(math.pi * past)
