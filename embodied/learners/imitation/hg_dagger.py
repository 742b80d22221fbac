"""HG-DAgger: behaviour cloning of demonstrations and human interventions during data collection.

Kelly et al., 2019 (DAgger: Ross et al., 2011). As it uses no rewards, the policy can be no better
than the people whose actions it imitates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config:
    batch_size: Count = 256  # transitions per update
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    gamma: Fraction = 0.99  # discount of the logged rewards; nothing is learned from them


class HgDagger(Learner):
    """Trained from a replay buffer. It imitates the transitions whose `intervened` is true; if a
    batch has no such column, all of them."""

    data = "off_policy"
    extra_columns: tuple[str, ...] = ("intervened",)

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        self.optims["adam"] = Adam(policy.parameters(), config.lr, partial=True)

    @classmethod
    def imitates(cls) -> bool:
        return True

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        action = batch["action"].unflatten(1, (self.policy.chunk, -1))
        theirs = batch.get("intervened", torch.ones_like(action[:, 0, 0])).to(action)
        valid = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
        errors = self.policy.loss({**batch, "action": action, "valid": valid})
        loss = (errors * theirs).sum() / theirs.sum().clamp(min=1.0)
        self.descend("adam", loss)
        return {"loss": loss.detach(), "share": theirs.mean()}
