"""PPO with behaviour cloning (BC) after its updates: the base of ppo_demos.py and ppo_rapid.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo import Ppo
from embodied.learners.on_policy.ppo_parts import clip_norm
from embodied.nn.optim import Adam, Optimizer


@dataclass(frozen=True)
class Config(ppo.Config):
    bc_steps: CountOrZero = 5  # BC steps after each update
    bc_decay: Fraction = 0.0  # share of the run over which they decay to 0; 0: no decay
    bc_lr: Fraction = 0.0  # Adam's learning rate of BC; 0: PPO's
    bc_batch_size: Count = 256  # decisions per BC step


class CloningPpo(Ppo):
    """PPO with BC steps on the losses of `_clone_loss`."""

    takes_memory = False
    optimizer_name: ClassVar[str]
    _clone_loss: Callable[[], Tensor]

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        if config.bc_decay and not run.decisions:
            raise ConfigError(f"bc_decay={config.bc_decay:g} needs the length of the run")
        weights = [p for p in policy.parameters() if p.requires_grad]
        self.cloner = Adam(weights, config.bc_lr or config.lr)

    def clone_steps(self) -> int:
        """BC steps that are due after this update."""
        left = remaining(self.done, self.config.bc_decay, self.total)
        return round(self.config.bc_steps * left)

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
