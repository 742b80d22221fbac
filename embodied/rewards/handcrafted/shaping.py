"""Potential-based reward shaping, which does not change the optimal policy.

    r' = env_weight r + weight (discount Phi(s') - Phi(s))

Ng, Harada and Russell, "Policy invariance under reward transformations" (1999). `discount` is that
of the transition: gamma^k for k steps, so that sums telescope, and 0 at a termination, where the
potential is 0 by definition. At a truncation Phi(s') counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import Number
from embodied.core.build import Node
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import Factor


@dataclass(frozen=True)
class Config:
    """Settings of potential-based shaping. A potential is best kept near 0: with gamma below 1 a
    constant c costs (1 - gamma) c per step."""

    potential: Node  # a factor of a state, see embodied.rewards.handcrafted.factors
    weight: Number = 1.0  # weight of the shaping
    env_weight: Number = 1.0  # weight of the environment's reward


class Shaping(SummedReward):
    """Applied once, when transitions are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.potential = Factor(config.potential, spec)

    def components(self, transitions: Tensors) -> Tensors:
        now, then = self.potential(transitions, "obs"), self.potential(transitions, "next_obs")
        gained = transitions["discount"] * then - now
        return {
            "env": self.config.env_weight * transitions["reward"],
            "shaping": self.config.weight * gained,
        }
