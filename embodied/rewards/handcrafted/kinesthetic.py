"""Kinesthetic reward (Lucy-SKG): potentials that are geometric means of factors."""

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


@dataclass(frozen=True)
class KinestheticConfig:
    """Settings of the kinesthetic reward."""

    utilities: dict[str, Node]  # a factor of a state, or {weight, all: [factors in -1..1]}
    events: dict[str, Node] = field(default_factory=dict)  # factors of the next state, added
    env_weight: Number = 1.0  # weight of the environment's reward
    join: Literal["krc", "sum"] = "krc"  # geometric mean of factors; "sum": mean, for comparison


class Kinesthetic(SummedReward):
    """Lucy-SKG (Moschopoulos et al., 2023): signed geometric means of factors as potentials, plus
    events; applied once.

        KRC(z) = sgn |prod_i z_i|^(1/n),   U = sum_k w_k u_k
        r' = env_weight r + discount U(s') - U(s) + R(s')

    In a weighted sum one factor can compensate for another; the product is large only if all
    factors are. `sgn` is +1 if no factor is negative, else -1; in the paper it is the sign of the
    product. Unlike in the paper, the potential at a termination is 0, so that the optimal policy
    does not change.
    """

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
    """One utility [N]: a factor, or the weighted mean of several."""

    def __init__(self, name: str, node: Node, spec: Spec, join: Literal["krc", "sum"]) -> None:
        self.together = "all" in node
        if self.together and (unknown := {*node} - {"all", "weight"}):
            raise ConfigError(f"reward.utilities.{name} has no setting {min(unknown)}: all, weight")
        self.factors = [Factor(each, spec) for each in (node["all"] if self.together else [node])]
        self.weight = float(node.get("weight", 1.0))
        self.join = join

    def __call__(self, transitions: Tensors, end: End) -> Tensor:
        values = [factor(transitions, end) for factor in self.factors]
        if not self.together:
            return values[0]  # the factor has its weight
        joined = krc(values) if self.join == "krc" else torch.stack(values).mean(0)
        return self.weight * joined


def krc(factors: Sequence[Tensor]) -> Tensor:
    """Geometric mean [N] of the sizes of factors [N] in [-1, 1], negative if one of them is."""
    z = torch.stack(list(factors)).clamp(-1, 1)
    size = z.abs().prod(0) ** (1 / len(z))
    return torch.where((z >= 0).all(0), size, -size)
