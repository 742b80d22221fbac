"""Kinesthetic reward (Lucy-SKG): signed geometric means of factors as potentials, plus events.

    KRC(z) = sgn |prod_i z_i|^(1/n),   U = sum_k w_k u_k
    r' = env_weight r + discount U(s') - U(s) + R(s')

Lucy-SKG (Moschopoulos et al., 2023). In a weighted sum one factor can compensate for another; the
product is large only if all factors are. `sgn` is +1 if no factor is negative, else -1 (`all`), or
the sign of the product (`product`, the paper's form for two factors). Unlike in the paper, the
potential at a termination is 0, so that the optimal policy does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.build import ConfigError, Node
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import End, Factor

Signs = Literal["all", "product"]


@dataclass(frozen=True)
class KinestheticConfig:
    """Settings of the kinesthetic reward."""

    utilities: dict[str, Node]  # a factor of a state, or {weight, all: [factors in -1..1], signs}
    events: dict[str, Node] = field(default_factory=dict)  # factors of the next state, added
    env_weight: Number = 1.0  # weight of the environment's reward
    join: Literal["krc", "sum"] = "krc"  # geometric mean of factors; "sum": mean, for comparison


class Kinesthetic(SummedReward):
    """Applied once, when transitions are stored."""

    frozen = True

    def __init__(self, config: KinestheticConfig, spec: Spec) -> None:
        self.config = config
        self.utilities = {
            name: Utility(name, node, spec, config.join) for name, node in config.utilities.items()
        }
        self.events = {name: Factor(node, spec) for name, node in config.events.items()}

    def components(self, transitions: Tensors) -> Tensors:
        gained = {
            name: transitions["discount"] * utility(transitions, "next_obs")
            - utility(transitions, "obs")
            for name, utility in self.utilities.items()
        }
        rewarded = {name: event(transitions) for name, event in self.events.items()}
        return {"env": self.config.env_weight * transitions["reward"], **gained, **rewarded}


class Utility:
    """One utility [N]: the weighted combination of its factors."""

    def __init__(self, name: str, node: Node, spec: Spec, join: Literal["krc", "sum"]) -> None:
        together = "all" in node
        if together and (unknown := {*node} - {"all", "weight", "signs"}):
            raise ConfigError(
                f"reward.utilities.{name} has no setting {min(unknown)}: all, weight, signs"
            )
        self.signs: Signs = node.get("signs", "all")
        if self.signs not in ("all", "product"):
            raise ConfigError(f"reward.utilities.{name}.signs={self.signs} must be all or product")
        self.factors = [Factor(each, spec) for each in (node["all"] if together else [node])]
        self.weight = float(node.get("weight", 1.0)) if together else 1.0
        self.together = together
        self.join = join

    def __call__(self, transitions: Tensors, end: End) -> Tensor:
        values = [factor(transitions, end) for factor in self.factors]
        if not self.together:
            return values[0]
        joined = krc(values, self.signs) if self.join == "krc" else torch.stack(values).mean(0)
        return self.weight * joined


def krc(factors: Sequence[Tensor], signs: Signs = "all") -> Tensor:
    """Signed geometric mean [N] of factors [N] in [-1, 1]."""
    z = torch.stack(list(factors)).clamp(-1, 1)
    size = z.abs().prod(0) ** (1 / len(z))
    good = (z >= 0).all(0) if signs == "all" else z.prod(0) >= 0
    return torch.where(good, size, -size)
