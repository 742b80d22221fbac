"""Kinesthetic: factors joined by a signed geometric mean, used as potentials, and events.

    KRC(z) = sgn |prod_i z_i|^(1/n),   U = sum_k w_k u_k
    r' = env_weight r + discount U(s') - U(s) + R(s')

Lucy-SKG (Moschopoulos et al., 2023). A weighted sum lets one factor be bought with another; the
product pays only for all together. `sgn` is +1 where no factor is negative, else -1 (`all`: two
wrongs make no right), or the sign of the product (`product`, the source's form for two). Unlike the
source's, the potential of a true end is 0, so that what is optimal stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import End, Factor

Signs = Literal["all", "product"]


@dataclass(frozen=True)
class Config:
    """`utilities` by name: a factor of a state, or `{weight, all: [factors in -1..1], signs}`.
    `events` by name: factors of the state that was reached, paid as they are. `join` "sum" takes
    the mean of a utility's factors instead (what this method is to be compared with)."""

    utilities: dict[str, Node]
    events: dict[str, Node] = field(default_factory=dict)
    env_weight: float = 1.0
    join: Literal["krc", "sum"] = "krc"


class Kinesthetic:
    """Applied once, when rows are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.utilities = {
            name: Utility(name, node, spec, config.join) for name, node in config.utilities.items()
        }
        self.events = {name: Factor(node, spec) for name, node in config.events.items()}

    def __call__(self, rows: Tensors) -> Tensor:
        return sum(self.components(rows).values(), start=0 * rows["reward"])

    def components(self, rows: Tensors) -> Tensors:
        gained = {
            name: rows["discount"] * utility(rows, "next_obs") - utility(rows, "obs")
            for name, utility in self.utilities.items()
        }
        paid = {name: event(rows) for name, event in self.events.items()}
        return {"env": self.config.env_weight * rows["reward"], **gained, **paid}

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}


class Utility:
    """One utility: the weighted combination of its factors, [N]."""

    def __init__(self, name: str, node: Node, spec: Spec, join: Literal["krc", "sum"]) -> None:
        together = "all" in node
        if together and (unknown := {*node} - {"all", "weight", "signs"}):
            raise ConfigError(f"reward.utilities.{name} has no {min(unknown)}: all, weight, signs")
        self.signs: Signs = node.get("signs", "all")
        if self.signs not in ("all", "product"):
            raise ConfigError(f"reward.utilities.{name}.signs={self.signs}: all or product")
        self.factors = [Factor(each, spec) for each in (node["all"] if together else [node])]
        self.weight = float(node.get("weight", 1.0)) if together else 1.0
        self.together, self.join = together, join

    def __call__(self, rows: Tensors, end: End) -> Tensor:
        values = [factor(rows, end) for factor in self.factors]
        if not self.together:
            return values[0]
        joined = krc(values, self.signs) if self.join == "krc" else torch.stack(values).mean(0)
        return self.weight * joined


def krc(factors: Sequence[Tensor], signs: Signs = "all") -> Tensor:
    """The signed geometric mean of factors [N], each taken to be in [-1, 1]."""
    z = torch.stack(list(factors)).clamp(-1, 1)
    size = z.abs().prod(0) ** (1 / len(z))
    good = (z >= 0).all(0) if signs == "all" else z.prod(0) >= 0
    return torch.where(good, size, -size)
