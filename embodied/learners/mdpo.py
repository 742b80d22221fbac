"""MDPO: mirror descent policy optimisation (Tomar et al., 2021), on-policy and off-policy.

**On-policy**: from a batch of pi_k, pi_{k+1} is what a few full-batch gradient steps make of

    L = E[ -rho A ] + E_s[ KL(pi(.|s) || pi_k(.|s)) ] / t_k - c_h E[ H(pi) ],   rho = pi / pi_k

without clipping; the KL is exact. t_k falls linearly to 0 over the run, so that steps become
smaller. The minimum is pi_k exp(t_k A) / Z. The value function is trained first, by `epochs` of
minibatches; advantages, values and normalisers are those of PPO.

**Off-policy**: SAC near its own past.

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
from typing import Literal, cast

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import RunPlan
from embodied.learners.off_policy import sac
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo_cloning import fit_step
from embodied.learners.on_policy.ppo_parts import (
    normalized,
    require_divergence,
    value_loss,
)

LEAST_T = 1e-3  # of t_k, in units of `t`: at the end of a run it would be 0


@dataclass(frozen=True)
class Config(ppo.OnPolicyConfig):
    """Settings of MDPO on-policy; `epochs` and `batch_size` are those of the value function."""

    epochs: Count = 5  # passes of the value function over a batch
    batch_size: Count = 128  # decisions per minibatch of the value function
    policy_steps: Count = 10  # m: gradient steps of the policy per batch, each on the whole batch
    t: Positive = 1.0  # t_0: step size of mirror descent, in units of 1 / (normalised) advantage
    anneal: bool = True  # t_k falls linearly to 0 over the run, if its length is known
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rates


class Mdpo(ppo.Ppo):
    """As Ppo, with another loss of the policy; for policies whose KL divergence is known in closed
    form."""

    separate = True

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        require_divergence(policy)
        super().__init__(cast(ppo.Config, config), policy, spec, run)
        self.before = copy.deepcopy(policy).requires_grad_(False)  # pi_k

    @property
    def t(self) -> float:
        """t_k of this update."""
        config = self.config
        left = 1 - self.done / self.total if self.total and config.anneal else 1.0
        return config.t * max(left, LEAST_T)

    def _learn(self, table: Tensors, size: int) -> dict[str, Tensor]:
        """Train the value function on minibatches of `size`, then the policy on `table`."""
        count = distributed.all_min(len(table["old"]))
        if not count:
            return {}
        epoch = self._epochs(table)
        device = table["old"].device
        fits = [
            epoch(ppo.shuffled(count, size, device), size)["value_loss"]
            for _ in range(self.config.epochs)
        ]
        self.before.load_state_dict(self.policy.state_dict())
        steps = [self._policy_step(table) for _ in range(self.config.policy_steps)]
        metrics = {key: torch.stack([step[key] for step in steps]).mean() for key in steps[0]}
        last = {"kl": steps[-1]["kl"], "t": torch.full_like(steps[-1]["kl"], self.t)}
        return metrics | last | {"value_loss": torch.cat(fits).mean()}

    def _step(self, minibatch: Tensors) -> dict[str, Tensor]:
        loss, metrics = self._loss(minibatch)
        self.descend("critic", loss)
        return metrics

    def _loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The value function's loss on a minibatch."""
        loss = value_loss(self._values(minibatch), minibatch["target"]).mean()
        return loss, {"value_loss": loss.detach()}

    def _policy_step(self, table: Tensors) -> dict[str, Tensor]:
        """One gradient step of the policy on all decisions."""
        advantage = table["advantage"]
        if self.config.advantage == "minibatch":
            advantage = normalized(advantage, torch.full_like(advantage, 1 / advantage.numel()))
        log_prob, entropy = self._evaluate_actions(table)
        parts = {
            "policy_loss": -((log_prob - table["old"]).exp() * advantage).mean(),
            "kl": self.policy.kl(under(table, "obs"), self.before).mean(),
            "entropy": entropy.mean(),
        }
        loss = parts["policy_loss"] + parts["kl"] / self.t - self.config.entropy * parts["entropy"]
        self.descend("actor", loss)
        return {name: part.detach() for name, part in parts.items()}

    def descend(self, name: str, loss: Tensor) -> None:
        """One gradient step on `loss`, clipped to `grad_clip`."""
        fit_step(self.optims[name], loss, self.config.grad_clip)


@dataclass(frozen=True)
class OffPolicyConfig(sac.Config):
    """Settings of MDPO off-policy; lambda is `initial_temperature`, which stays by default."""

    temperature_lr: Fraction = 0.0  # Adam's learning rate of log lambda; 0: lambda stays
    initial_temperature: Positive = 0.2  # lambda at the start, in units of the reward
    c: NonNegative = 1.0  # 1 / t_k: weight of log pi in the policy's loss; lambda: SAC
    refresh: Count = 1000  # m: updates between two renewals of pi_k


class MdpoOffPolicy(sac.Sac):
    """As Sac, with the policy held near its copy `before`."""

    def __init__(self, config: OffPolicyConfig, policy: Policy, spec: Spec) -> None:
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
