"""Weighted sum of hand-written factors, the usual dense reward.

r = env_weight r_env + scale sum_k w_k z_k(s')
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
    """Settings of the weighted sum."""

    factors: dict[str, Node]  # factors of the next observation, see `handcrafted.factors`
    scale: Number = 1.0  # multiplies all factors
    env_weight: Number = 1.0  # weight of the environment's reward


class WeightedSum(SummedReward):
    """Applied once, when transitions are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.factors = {name: Factor(node, spec) for name, node in config.factors.items()}

    def components(self, transitions: Tensors) -> Tensors:
        parts = {
            name: self.config.scale * factor(transitions) for name, factor in self.factors.items()
        }
        return {"env": self.config.env_weight * transitions["reward"], **parts}
