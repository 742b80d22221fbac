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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, Fraction, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, take
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo import Ppo
from embodied.learners.on_policy.ppo_parts import clip_norm
from embodied.nn.optim import Adam, Optimizer


@dataclass(frozen=True)
class CloneConfig(ppo.Config):
    """Settings of PPO with behaviour cloning (BC) after its updates."""

    bc_steps: CountOrZero = 5  # BC steps after each update
    bc_decay: Fraction = 0.0  # share of the run over which they decay to 0; 0: no decay
    bc_lr: Fraction = 0.0  # Adam's learning rate of BC; 0: PPO's
    bc_batch_size: Count = 256  # decisions per BC step


class CloningPpo(Ppo):
    """PPO with BC steps on the losses of `_clone_loss`."""

    optimizer_name: ClassVar[str]
    _clone_loss: Callable[[], Tensor]

    def __init__(self, config: CloneConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        if config.bc_decay and not run.decisions:
            raise ConfigError(f"bc_decay={config.bc_decay:g} needs the length of the run")
        weights = [p for p in policy.parameters() if p.requires_grad]
        self.cloner = Adam(weights, config.bc_lr or config.lr)

    def clone_steps(self) -> int:
        """BC steps that are due after this update."""
        config: CloneConfig = self.config
        return round(config.bc_steps * remaining(self.done, config.bc_decay, self.total))

    def _clone(self, steps: int) -> Tensor:
        """Do `steps` BC steps; returns the mean loss."""
        losses: list[Tensor] = []
        for _ in range(steps):
            loss = self._clone_loss()
            fit_step(self.cloner, loss, self.config.grad_clip)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {**super().optimizers(), self.optimizer_name: self.cloner}


@dataclass(frozen=True)
class Config(CloneConfig):
    """Settings of PPO with demonstrations."""

    bc_pretrain_steps: CountOrZero = 1000  # BC steps before PPO
    critic_warmup: CountOrZero = 5  # updates after these that train the value function only
    bc_lr: PositiveFraction = 1e-3  # Adam's learning rate of BC
    bc_batch_size: Count = 256  # action chunks per BC step


class PpoDemos(CloningPpo):
    """PPO with demonstrations; without a call of `set_demonstrations` it is PPO.

    The first batch, collected before BC, only updates the normalisers.
    """

    rows = "chunks"
    counters = ("updates",)
    optimizer_name = "clone"
    free: Tensor

    def __init__(
        self, config: Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        super().__init__(config, policy, spec, run)
        if self.recurrent or not hasattr(policy, "loss"):
            raise ConfigError(
                "this learner needs a policy without memory and with an imitation loss"
            )
        self.config: Config = config
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
        metrics = super().update(batch)
        steps = self.clone_steps()
        if self.shown is not None and steps and bool(self.free):
            metrics["clone_loss"] = self._clone(steps)
        return metrics

    def _clone_loss(self) -> Tensor:
        assert self.shown is not None
        index = torch.randint(tt.length(self.shown), (self.config.bc_batch_size,))
        return self.policy.loss(tt.to(take(self.shown, index), self.free.device)).mean()  # type: ignore[attr-defined]

    def _total(self, parts: dict[str, Tensor]) -> Tensor:
        policy = parts["policy_loss"] - self.config.entropy * parts["entropy"]
        return self.free * policy + self.config.value_weight * parts["value_loss"]


def remaining(done: int, fade: float, total: int) -> float:
    """Factor of `bc_steps` after `done` of `total` decisions: decays linearly from 1 to 0 over the
    share `fade` of them (0: always 1)."""
    return max(1 - done / (fade * total), 0.0) if fade else 1.0


def fit_step(adam: Adam, loss: Tensor, most: float) -> None:
    """One step of `adam` on `loss`, with gradients clipped to the norm `most` (0: no clipping)."""
    loss.backward()
    weights = adam.param_groups[0]["params"]
    for weight in weights:  # parameters that the loss does not use, such as the std
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    if most:
        distributed.average_gradients(weights)
        clip_norm([weight.grad for weight in weights], most)
    adam.step()
