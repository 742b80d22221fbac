"""A learner, from nothing but the contract."""

from dataclasses import dataclass

import torch

from embodied.core.policy import Policy
from embodied.learners.learner import Learner


@dataclass(frozen=True)
class Config:
    batch_size: int = 256
    lr: float = 3e-2
    temperature: float = 0.05


class RewardWeightedRegression(Learner):
    """Imitate your own actions, the rewarded ones most (Peters and Schaal, 2007)."""

    data = "replay"
    gamma = 0.0

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__()
        self.policy, self.batch_size = policy, config.batch_size
        self.temperature = config.temperature
        self.adam = torch.optim.Adam(policy.parameters(), lr=config.lr)

    def update(self, batch):
        mean = self.policy.act({"state": batch["obs/state"]}, {}, torch.zeros(()))[0][:, 0]
        gain = batch["reward"] + batch["obs/state"].norm(dim=1)  # progress, not place
        weight = torch.softmax(gain / self.temperature, 0)
        loss = (weight[:, None] * (mean - batch["action"]) ** 2).sum()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return {"loss": loss.detach()}

    def optimizers(self):
        return {"adam": self.adam}
