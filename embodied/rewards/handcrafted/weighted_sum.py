"""Weighted sum of hand-written factors, the usual dense reward.

r = env_weight r_env + scale sum_k w_k z_k(s')
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.build import Node
from embodied.core.reward import Reward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import Factor


@dataclass(frozen=True)
class Config:
    """`factors` by name, see `embodied.rewards.handcrafted.factors`, computed from the next
    observation; `scale` multiplies all of them."""

    factors: dict[str, Node]
    scale: float = 1.0
    env_weight: float = 1.0


class WeightedSum(Reward):
    """Applied once, when transitions are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.factors = {name: Factor(node, spec) for name, node in config.factors.items()}

    def __call__(self, rows: Tensors) -> Tensor:
        return sum(self.components(rows).values(), start=0 * rows["reward"])

    def components(self, rows: Tensors) -> Tensors:
        parts = {name: self.config.scale * factor(rows) for name, factor in self.factors.items()}
        return {"env": self.config.env_weight * rows["reward"], **parts}

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}
