"""Behaviour cloning of any policy with an imitation loss, with an EMA of the weights.

What acts and is saved is the exponential moving average of the trained weights, which diffusion
and flow policies need (Chi et al., 2023).

    averaged <- ema averaged + (1 - ema) trained
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.gradient_learner import soft_update
from embodied.learners.learner import Learner
from embodied.moved import attributes
from embodied.nn.optim import Optimizer


@dataclass(frozen=True)
class Config:
    """`lr` falls along a cosine to a tenth over the run; `ema`: decay of the average (0: none),
    smaller at first, so that the initial weights are soon forgotten."""

    batch_size: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-6
    ema: float = 0.995
    grad_clip: float = 10.0


class BehaviorCloning(Learner):
    """One AdamW step on the mean loss per update."""

    data = "offline"
    rows = "chunks"

    def __init__(self, config: Config, policy: Policy, total_steps: int) -> None:
        super().__init__()
        self.config, self.batch_size = config, config.batch_size
        self.online = policy
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        self.adam = torch.optim.AdamW(
            policy.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.done, self.total = 0, max(total_steps, 1)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.adam.param_groups[0]["lr"] = cosine(self.config.lr, self.done / self.total)
        self.adam.zero_grad()
        loss = self.online.loss(batch).mean()
        loss.backward()
        distributed.average_gradients(self.online.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.online.parameters(), self.config.grad_clip)
        self.adam.step()
        self.done += 1
        ema = min(self.config.ema, (1 + self.done) / (10 + self.done))
        soft_update(list(self.policy.parameters()), list(self.online.parameters()), 1 - ema)
        return {"loss": loss.detach(), "grad_norm": norm}

    def fit(self, rows: Tensors) -> None:
        self.online.fit(rows)
        self.policy.fit(rows)

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {"adam": self.adam}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "done": self.done}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.done = state["done"]


def cosine(lr: float, progress: float) -> float:
    """From `lr` at progress 0 to a tenth of it at 1, and no further."""
    return lr * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


__getattr__ = attributes(__name__)
