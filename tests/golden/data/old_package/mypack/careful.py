"""A learner that is one of the project's with a change."""

from dataclasses import dataclass

import torch

from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.learners import sac


@dataclass(frozen=True)
class Config(sac.Config):
    largest: float = 5.0


class Careful(sac.Sac):
    """Rewards are cut off."""

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.largest = config.largest

    def update(self, batch):
        reward = torch.clamp(batch["reward"], -self.largest, self.largest)
        return super().update({**batch, "reward": reward})
