"""Exp3: which of several trained policies to play, learned from whole episodes while they are used.

PROTECTED (Liu et al., 2024) deploys a set of K policies, none of which is the best against every
attack, and adapts to the attacks it meets by EXP3 (Auer et al., 2002). In each of T episodes member
i is played with probability p_i; the return R of the episode changes its weight,

    r = clip((R - low) / (high - low), 0, 1),   w_i <- w_i exp(eta r / (p_i + g)),   p = w / sum w
    eta = rate sqrt(ln K / (K T)),   g = eta / 2,

so that what is lost to the best member grows as sqrt(T K ln K), also where the adversary chooses
the attack of every episode. The probability is that of the draw, as episodes run in parallel. With
`rate` 0 the members are mixed uniformly, which is the control. The policy that is saved plays its
most probable member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, NonNegative, Number
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, state_to
from embodied.learners.finetune.ticket import finished_episodes
from embodied.learners.learner import Learner
from embodied.policies.wrappers.policy_set import PolicySet


@dataclass(frozen=True)
class Config:
    episodes: Count = 1000  # T, episodes to learn in
    rate: NonNegative = 2.0  # factor of the learning rate; 5 where the attack changes
    returns: tuple[Number, Number] = (0.0, 1.0)  # returns of an episode that count as 0 and as 1
    horizon: Count = 1  # decisions of each parallel environment between two updates


class Exp3(Learner):
    """`update` takes the newest decisions, in the order of time, and sets the probabilities of a
    `PolicySet`. `running` [B] are the episodes that go on; it and the weights are on the CPU."""

    data = "on_policy"
    usual_policy = "policy_set"
    keeps_stale = True
    batch_size = 0
    gamma = 1.0
    counters = ("log_weights", "played", "total", "running")

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, PolicySet):
            raise ConfigError("learner=exp3 chooses among policies: policy=policy_set init=RUN")
        if config.returns[0] >= config.returns[1]:
            raise ConfigError("learner.returns: [low, high] with low < high")
        count = len(policy.probability)
        self.eta = config.rate * math.sqrt(math.log(count) / (count * config.episodes))
        self.log_weights = torch.zeros(count, dtype=torch.float64)
        self.played = torch.zeros(count, dtype=torch.int64)
        self.total = torch.zeros(count, dtype=torch.float64)  # sum of the returns of each member
        self.running: Tensors = {}

    @torch.no_grad()
    def update(self, batch: Tensors) -> dict[str, Tensor]:
        names = ("member", "probability")
        self.running, finished = finished_episodes(
            self.running, batch, {name: batch[name].cpu() for name in names}
        )
        for ended in finished:
            self._learn(ended["member"], ended["probability"], ended["returns"])
        probability = self.log_weights.softmax(0)
        self.policy.probability.copy_(probability)
        metrics = {f"probability_{i}": value.float() for i, value in enumerate(probability)}
        return metrics | {
            "episodes": self.played.sum().float(),
            "mean_return": (self.total.sum() / self.played.sum().clamp(min=1)).float(),
        }

    def _learn(self, member: Tensor, probability: Tensor, returns: Tensor) -> None:
        """Add the episodes [N] that ended in one step."""
        low, high = self.config.returns
        gain = ((returns.double() - low) / (high - low)).clamp(0, 1)
        gain = self.eta * gain / (probability.double() + self.eta / 2)
        self.log_weights = self.log_weights.index_add(0, member, gain)
        self.played = self.played + torch.bincount(member, minlength=len(self.played))
        self.total = self.total.index_add(0, member, returns.double())

    def set_state(self, state: dict[str, object]) -> None:
        here = {name: state_to(state[name], "cpu") for name in self.counters}
        super().set_state({**state, **here})
