"""A learner out of the project's parts: one critic, and the policy climbs it."""

import copy
from dataclasses import dataclass

import torch

from embodied.core.adam import Adam
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.critic import Critic, critic_loss
from embodied.learners.descent import Descent, follow, still


@dataclass(frozen=True)
class Config:
    batch_size: int = 32
    hidden: tuple[int, ...] = (16, 16)
    lr: float = 1e-3
    tau: float = 0.01
    compile: bool = False
    cuda_graph: bool = False


class Pathwise(Descent):
    data = "replay"
    gamma = 0.9

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__()
        self.config, self.policy, self.batch_size = config, policy, config.batch_size
        self.critic = Critic(spec, spec.act.size, 2, config.hidden)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.weights = list(self.critic.parameters())
        self.averages = list(self.target.parameters())
        self.adams = {
            "critic": Adam(self.weights, config.lr),
            "actor": Adam(policy.parameters(), config.lr),
        }
        self.judge = self.compiled(self._critic_loss)
        self.step = self.recorded(self._step)

    def update(self, batch: Tensors) -> Tensors:
        return self.step(batch)

    def _step(self, batch: Tensors) -> Tensors:
        error = self.judge(batch)
        self.descend("critic", error)
        with still(self.weights):
            obs = under(batch, "obs")
            self.descend("actor", -self.critic(obs, self._acts(obs)).mean())
        follow(self.averages, self.weights, self.config.tau)
        return {"critic_loss": error.detach()}

    def _critic_loss(self, batch: Tensors) -> torch.Tensor:
        after = under(batch, "next_obs")
        with torch.no_grad():
            value = self.target(after, self._acts(after)).amin(0)
        q = self.critic(under(batch, "obs"), batch["action"])
        return critic_loss(q, batch["reward"] + batch["discount"] * value)

    def _acts(self, obs: Tensors) -> torch.Tensor:
        noise = torch.zeros(len(obs["state"]), self.policy.spec.act.size)
        return self.policy.act(obs, {}, noise)[0][:, 0]
