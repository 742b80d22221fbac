"""Factors: small functions of named elements of an observation, for hand-written rewards.

A factor is a node: `of` names a function (of this module, or by its dotted name); the other keys
are its arguments. A string argument selects a part of the transition:

    tool            the elements tool_x, tool_y, tool_z of the observation that has them
    x,y             these elements, by name
    state[0:3]      elements of an observation by index (state[2]: one of them)
    action, reward  the action, the environment's reward

A list of numbers is a constant vector, null omits an argument, and anything else is passed on.

    {of: near, a: tool, b: goal, scale: 0.1}
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Number
from embodied.core.build import ConfigError, Node, build, named_function, nearest
from embodied.core.reward import End, Potential, SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

Part = Callable[[Tensors, End], Tensor]
SLICE = re.compile(r"(?P<leaf>[\w/]+)\[(?P<first>\d+)(:(?P<last>\d+))?\]")
SMALL = 1e-6


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distance [N] of vectors [N, D]."""
    return (a - b).norm(dim=1)


def near(a: Tensor, b: Tensor, scale: float = 0.1) -> Tensor:
    """1 at distance 0, 0.24 at distance `scale`, 0 far away."""
    return 1 - torch.tanh((a - b).norm(dim=1) / scale)


def proximity(
    a: Tensor, b: Tensor, reach: float = 1.0, dispersion: float = 1.0, density: float = 1.0
) -> Tensor:
    """exp(-d / (2 reach dispersion))^(1 / density): in (0, 1], flatter the larger `dispersion`."""
    return torch.exp(-0.5 * distance(a, b) / (reach * dispersion)) ** (1 / density)


def closeness(
    a: Tensor, b: Tensor, reach: float = 1.0, dispersion: float = 1.0, density: float = 1.0
) -> Tensor:
    """`proximity` rescaled to (-1, 1]: 2 p - 1 with its power taken by magnitude."""
    centred = 2 * proximity(a, b, reach, dispersion) - 1
    return centred.sign() * centred.abs() ** (1 / density)


def alignment(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Cosine of the angle between b - a and c - b: 1 if b lies between a and c on a line."""
    return functional.cosine_similarity(b - a, c - b, dim=1, eps=SMALL)


def heading(velocity: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between a velocity and b - a."""
    return functional.cosine_similarity(velocity, b - a, dim=1, eps=SMALL)


def effort(a: Tensor) -> Tensor:
    """Mean square of a vector, for example of the action."""
    return a.float().flatten(1).square().mean(1)


def value(a: Tensor) -> Tensor:
    """The value of a single element."""
    return a.float().flatten(1)[:, 0]


def above(a: Tensor, than: float) -> Tensor:
    """1 if a single element exceeds `than`, else 0."""
    return (a.flatten(1)[:, 0] > than).float()


def within(a: Tensor, limit: float, otherwise: float = 0.0) -> Tensor:
    """1 where a single element is at most `limit`, else `otherwise`."""
    return torch.where(a.flatten(1)[:, 0] <= limit, 1.0, otherwise)


def fading(a: Tensor, scale: float) -> Tensor:
    """max(0, 1 - a / scale) of a single element that is 0 or more."""
    return (1 - a.flatten(1)[:, 0] / scale).clamp(0, 1)


def held(a: Tensor, seconds: float, floor: float = 0.5) -> Tensor:
    """1 less a share of (1 - floor): that of the clocks `a` [N, D] which are below `seconds`."""
    return 1 - (1 - floor) * (a < seconds).float().mean(1)


class Factor(Potential):
    """A factor for observations of `spec`, made from a node `{of, weight, ...}`."""

    def __init__(self, node: Node, spec: Spec) -> None:
        given = {key: argument for key, argument in node.items() if argument is not None}
        if "of" not in given:
            raise ConfigError(f"a factor needs `of` ({', '.join(REGISTRY)}, or a dotted name)")
        name = str(given.pop("of"))
        self.weight = float(given.pop("weight", 1.0))
        if "." not in name and name not in REGISTRY:
            raise ConfigError(f'no factor is called "{name}"{nearest(name, REGISTRY)}')
        self.function = named_function(name, "factor") if "." in name else REGISTRY[name]
        try:
            inspect.signature(self.function).bind(**given)
        except TypeError as error:
            takes = ", ".join(inspect.signature(self.function).parameters)
            why = f"factor {name}({takes}): {error} (KEY=null omits an argument)"
            raise ConfigError(why) from error
        self.arguments = {key: part_of(argument, spec) for key, argument in given.items()}

    def __call__(self, transitions: Tensors, end: End = "next_obs") -> Tensor:
        """Weighted values [N] (float32) at the observations `end` of transitions."""
        given = {k: v(transitions, end) if callable(v) else v for k, v in self.arguments.items()}
        return self.weight * self.function(**given).float()


def part_of(argument: Any, spec: Spec) -> Part | Any:
    """The function that selects an argument from transitions; non-string arguments are returned as
    is."""
    if isinstance(argument, list | tuple):
        constant = torch.tensor(argument, dtype=torch.float32)
        return lambda transitions, end: constant.to(transitions["reward"].device).expand(
            len(transitions["reward"]), -1
        )
    if not isinstance(argument, str):
        return argument
    if argument in ("action", "reward", "discount"):
        return lambda transitions, end: _matrix(transitions[argument])
    leaf, index = _elements(argument, spec)
    if index is None:
        return lambda transitions, end: _matrix(transitions[f"{end}/{leaf}"])
    return lambda transitions, end: _matrix(transitions[f"{end}/{leaf}"])[:, index]


def _elements(text: str, spec: Spec) -> tuple[str, list[int] | None]:
    """The observation that `text` refers to, and the indices of its elements (None: all)."""
    if found := SLICE.fullmatch(text):
        leaf, first = found["leaf"], int(found["first"])
        last = first + 1 if found["last"] is None else int(found["last"])
        if leaf not in spec.obs or not first < last <= spec.obs[leaf].size:
            shown = {name: list(each.shape) for name, each in spec.obs.items()}
            raise ConfigError(f"{text} is out of range; observations: {shown}")
        return leaf, list(range(first, last))
    if text in spec.obs:
        return text, None
    for names in (text.split(","), [f"{text}_{axis}" for axis in "xyz"]):
        for leaf, each in spec.obs.items():
            if each.names and all(name.strip() in each.names for name in names):
                return leaf, [each.names.index(name.strip()) for name in names]
    known = {re.sub("_[xyz]$", "", name) for leaf in spec.obs.values() for name in leaf.names}
    raise ConfigError(
        f'no observation or element is called "{text}"{nearest(text, [*known, *spec.obs])}; '
        "select elements without names as NAME[FIRST:LAST]"
    )


def _matrix(values: Tensor) -> Tensor:
    return values.float().reshape(len(values), math.prod(values.shape[1:]))


REGISTRY: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        *(distance, near, proximity, closeness, alignment, heading, effort, value, above),
        *(within, fading, held),
    )
}


@dataclass(frozen=True)
class SumConfig:
    """Settings of the weighted sum."""

    factors: dict[str, Node]  # factors of the next observation, see `handcrafted.factors`
    scale: Number = 1.0  # multiplies all factors
    env_weight: Number = 1.0  # weight of the environment's reward


class WeightedSum(SummedReward):
    """The usual dense reward: r = env_weight r_env + scale sum_k w_k z_k(s'). Applied once, when
    transitions are stored.
    """

    frozen = True

    def __init__(self, config: SumConfig, spec: Spec) -> None:
        self.config = config
        self.factors = {name: Factor(node, spec) for name, node in config.factors.items()}

    def components(self, transitions: Tensors) -> Tensors:
        parts = {
            name: self.config.scale * factor(transitions) for name, factor in self.factors.items()
        }
        return {"env": self.config.env_weight * transitions["reward"], **parts}


@dataclass(frozen=True)
class ShapingConfig:
    """Settings of potential-based shaping. A potential is best kept near 0: with gamma below 1 a
    constant c costs (1 - gamma) c per step."""

    potential: Node  # a factor of a state (see above), or the `_target_` of a Potential
    weight: Number = 1.0  # weight of the shaping
    env_weight: Number = 1.0  # weight of the environment's reward


class Shaping(SummedReward):
    """Potential-based shaping, which does not change the optimal policy; applied once.

        r' = env_weight r + weight (discount Phi(s') - Phi(s))

    Ng, Harada and Russell, "Policy invariance under reward transformations" (1999). `discount` is
    that of the transition: gamma^k for k steps, so that sums telescope, and 0 at a termination,
    where the potential is 0 by definition. At a truncation Phi(s') counts.
    """

    frozen = True
    sums_steps = True

    def __init__(self, config: ShapingConfig, spec: Spec) -> None:
        self.config = config
        own = "_target_" in config.potential
        self.potential: Potential = (
            build(config.potential, Potential, spec=spec) if own else Factor(config.potential, spec)
        )

    def components(self, transitions: Tensors) -> Tensors:
        now, then = self.potential(transitions, "obs"), self.potential(transitions, "next_obs")
        gained = transitions["discount"] * then - now
        return {
            "env": self.config.env_weight * transitions["reward"],
            "shaping": self.config.weight * gained,
        }


@dataclass(frozen=True)
class ProductConfig:
    """Settings of the product; see `embodied.rewards.handcrafted.factors` for factors. All of them
    are computed from the next observation."""

    progress: Node  # factor: progress made in this step
    factors: dict[str, Node] = field(default_factory=dict)  # factors in [0, 1] that multiply it
    penalties: dict[str, Node] = field(default_factory=dict)  # factors that are subtracted
    scale: Number = 1.0  # multiplies the whole


class Multiplicative(SummedReward):
    """Progress times soft penalties, less a penalty at the end; applied once. CaRL (Jaeger et al.,
    "CaRL: Learning Scalable Planning Policies with Simple Rewards", 2025):

        r = scale (progress(s') prod_j p_j(s') - sum_k T_k(s')),   0 <= p_j <= 1

    Progress is the percentage of the task done in this step, so that what can be obtained is
    finite, and breaking several rules at once costs no more than the progress itself. Hard
    infractions are terminations of the environment, with a small T. A factor that an untrained
    policy cannot avoid must stay above 0.

    A penalty that is held for k steps is a factor `held` of an observed clock (the time since the
    rule was broken), not a memory of the reward: the critic needs that clock, or the value is not
    Markov. The environment's reward is not used.
    """

    frozen = True

    def __init__(self, config: ProductConfig, spec: Spec) -> None:
        self.config = config
        self.progress = Factor(config.progress, spec)
        self.factors = {name: Factor(node, spec) for name, node in config.factors.items()}
        self.penalties = {name: Factor(node, spec) for name, node in config.penalties.items()}
        for name, factor in self.factors.items():
            if not 0 < factor.weight <= 1:
                raise ConfigError(
                    f"reward.factors.{name}.weight is {factor.weight:g}: a factor of a product has "
                    "a weight in (0, 1]"
                )

    def components(self, transitions: Tensors) -> Tensors:
        done = self.progress(transitions)
        for factor in self.factors.values():
            done = done * factor(transitions)
        lost = {name: -penalty(transitions) for name, penalty in self.penalties.items()}
        return {name: self.config.scale * part for name, part in {"progress": done, **lost}.items()}
