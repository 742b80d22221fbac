"""HG-DAgger: behaviour cloning of demonstrations and human interventions during data collection.

    minimise  E_{transitions with human actions} loss(policy; obs, action)

HG-DAgger (Kelly et al., 2019; DAgger: Ross et al., 2011). As it uses no rewards, the policy can be
no better than the people whose actions it imitates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam, Optimizer


@dataclass(frozen=True)
class Config:
    """Settings of HG-DAgger."""

    batch_size: Count = 256  # transitions per update
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    gamma: Fraction = 0.99  # discount of the logged rewards; nothing is learned from them


class HgDagger(Learner):
    """HG-DAgger, trained from a replay buffer. It imitates the transitions whose `intervened` is
    true; if a batch has no such column, all of them."""

    data = "off_policy"
    extra_columns: tuple[str, ...] = ("intervened",)

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__()
        self.config = config
        self.policy = policy
        self.spec = spec
        self.batch_size = config.batch_size
        self.gamma = config.gamma
        self.adam = Adam(policy.parameters(), config.lr, local=True)

    @classmethod
    def imitates(cls) -> bool:
        return True

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        action = batch["action"].unflatten(1, (self.policy.chunk, -1))
        theirs = batch.get("intervened", torch.ones_like(action[:, 0, 0])).to(action)
        valid = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
        errors = self.policy.loss({**batch, "action": action, "valid": valid})
        loss = (errors * theirs).sum() / theirs.sum().clamp(min=1.0)
        loss.backward()
        distributed.average_gradients(self.policy.parameters())
        self.adam.step()
        return {"loss": loss.detach(), "share": theirs.mean()}

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {"adam": self.adam}
