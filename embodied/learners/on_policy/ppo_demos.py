"""PPO with demonstrations: behaviour cloning before PPO and after each of its updates.

PPO with offline data, for procedurally generated environments (Andres et al., 2023); on MiniGrid
two demonstrations can be enough. First `bc_pretrain_steps` steps of behaviour cloning; then
`critic_warmup` critic-only updates, as advantages of an untrained critic would degrade the policy;
then PPO with `bc_steps` BC steps after each update, decayed to 0 over the share `bc_decay` of the
run:

    L = - mean log pi(a | o)     over (o, a) of the demonstrations

or the policy's own `loss`: a diagonal Gaussian policy regresses its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, PositiveFraction
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, take
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy import ppo_cloning


@dataclass(frozen=True)
class Config(ppo_cloning.Config):
    bc_pretrain_steps: CountOrZero = 1000  # BC steps before PPO
    critic_warmup: CountOrZero = 5  # updates after these that train the value function only
    bc_lr: PositiveFraction = 1e-3  # Adam's learning rate of BC
    bc_batch_size: Count = 256  # action chunks per BC step


class PpoDemos(ppo_cloning.CloningPpo):
    """PPO with demonstrations; without a call of `set_demonstrations` it is PPO. The first batch,
    collected before BC, only updates the normalisers."""

    rows = "chunks"
    counters = ("updates",)
    optimizer_name = "clone"
    separate = True  # while only values learn, the divergence of the policy sets no rates
    free: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        self.register_buffer("free", torch.ones(()))  # 0 during critic-only updates
        self.shown: Tensors | None = None
        self.updates = 0
        self.estimates = None  # the first batch is of an untrained policy

    def set_demonstrations(self, demonstrations: Tensors) -> None:
        """Set the demonstrations: `obs/*` [N, ...], `action` [N, H, ...], `valid` [N, H]."""
        self.shown = {key: value for key, value in demonstrations.items() if key != "episode"}

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        first = self.updates == 0
        self.updates = self.updates + 1
        if first and self.shown is not None and self.config.bc_pretrain_steps:
            self._observe({key: v for key, v in batch.items() if not key.startswith("carry/")})
            self.done += batch["valid"].numel()
            return {"clone_loss": self._clone(self.config.bc_pretrain_steps)}
        cold = self.config.critic_warmup + bool(self.config.bc_pretrain_steps)
        self.free.fill_(float(self.shown is None or self.updates > cold))
        self.lr.active[0] = self.free
        metrics = super().update(batch)
        steps = self.clone_steps()
        if self.shown is not None and steps and bool(self.free):
            metrics["clone_loss"] = self._clone(steps)
        return metrics

    def _clone_loss(self) -> Tensor:
        assert self.shown is not None
        index = torch.randint(tt.length(self.shown), (self.config.bc_batch_size,))
        return self.policy.loss(tt.to(take(self.shown, index), self.free.device)).mean()

    def _total(self, parts: dict[str, Tensor]) -> Tensor:
        policy = parts["policy_loss"] - self.config.entropy * parts["entropy"]
        return self.free * policy + self.config.value_weight * parts["value_loss"]
