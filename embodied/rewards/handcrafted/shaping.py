"""Shaping: a potential over states added to the world's reward, without changing what is optimal.

    r' = env_weight r + weight (discount Phi(s') - Phi(s))

Ng, Harada and Russell, "Policy invariance under reward transformations" (1999). `discount` is the
row's own: gamma^k for k steps, so that sums of rows telescope, and 0 at a true end, where the
potential is 0 by definition; at a time limit Phi(s') counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.build import Node
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import Factor


@dataclass(frozen=True)
class Config:
    """`potential`: a factor (see embodied.rewards.handcrafted.factors) of a state, best kept near
    0: with gamma
    below 1 a constant c costs (1 - gamma) c a step."""

    potential: Node
    weight: float = 1.0
    env_weight: float = 1.0


class Shaping:
    """Applied once, when rows are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.potential = Factor(config.potential, spec)

    def __call__(self, rows: Tensors) -> Tensor:
        return sum(self.components(rows).values(), start=0 * rows["reward"])

    def components(self, rows: Tensors) -> Tensors:
        now, then = self.potential(rows, "obs"), self.potential(rows, "next_obs")
        gained = rows["discount"] * then - now
        return {
            "env": self.config.env_weight * rows["reward"],
            "shaping": self.config.weight * gained,
        }

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}
