"""Factors: small pure functions of named parts of an observation, for potentials and preferences.

A factor is written down as a node: `of` names a function (one of this file, or the dotted name of
another), everything else are its arguments. An argument that is text means a part of the rows:

    tool            the elements tool_x, tool_y, tool_z of the one leaf that has them
    x,y             these elements, by name
    state[0:3]      elements of a leaf (state[2] is one)
    action, reward  of the transition: the action, the world's own reward

A list of numbers is a vector that is the same for all rows, null leaves an argument out, everything
else is passed on as it is.

    {of: near, a: tool, b: goal, scale: 0.1}
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError, Node, nearest, resolve
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

End = Literal["obs", "next_obs"]
Part = Callable[[Tensors, End], Tensor]
SLICE = re.compile(r"(?P<leaf>[\w/]+)\[(?P<first>\d+)(:(?P<last>\d+))?\]")
SMALL = 1e-6


def distance(a: Tensor, b: Tensor) -> Tensor:
    """How far apart, [N], of vectors [N, D]."""
    return (a - b).norm(dim=1)


def near(a: Tensor, b: Tensor, scale: float = 0.1) -> Tensor:
    """1 where they meet, 0.24 where they are `scale` apart, 0 far away."""
    return 1 - torch.tanh((a - b).norm(dim=1) / scale)


def proximity(
    a: Tensor, b: Tensor, reach: float = 1.0, dispersion: float = 1.0, density: float = 1.0
) -> Tensor:
    """exp(-d / (2 reach dispersion))^(1 / density): in (0, 1], flatter the larger `dispersion`."""
    return torch.exp(-0.5 * distance(a, b) / (reach * dispersion)) ** (1 / density)


def closeness(
    a: Tensor, b: Tensor, reach: float = 1.0, dispersion: float = 1.0, density: float = 1.0
) -> Tensor:
    """`proximity` about its middle: 2 (p - 1/2), its power taken with the sign, in (-1, 1]."""
    centred = 2 * proximity(a, b, reach, dispersion) - 1
    return centred.sign() * centred.abs() ** (1 / density)


def alignment(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Cosine between the ways a -> b and b -> c: 1 where a stands behind b, seen from c."""
    return functional.cosine_similarity(b - a, c - b, dim=1, eps=SMALL)


def heading(velocity: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Cosine between a velocity and the way a -> b."""
    return functional.cosine_similarity(velocity, b - a, dim=1, eps=SMALL)


def effort(a: Tensor) -> Tensor:
    """Mean square of a vector (an action's energy)."""
    return a.float().flatten(1).square().mean(1)


def value(a: Tensor) -> Tensor:
    """The one element itself."""
    return a.float().flatten(1)[:, 0]


def above(a: Tensor, than: float) -> Tensor:
    """1 where the one element is above a number."""
    return (a.flatten(1)[:, 0] > than).float()


class Factor:
    """A node `{of, weight, ...}` made ready for a world; call it on rows, at either end of them."""

    def __init__(self, node: Node, spec: Spec) -> None:
        given = {key: argument for key, argument in node.items() if argument is not None}
        if "of" not in given:
            raise ConfigError(f"a factor needs `of` ({', '.join(REGISTRY)}, or a dotted name)")
        name, self.weight = str(given.pop("of")), float(given.pop("weight", 1.0))
        self.function = resolve(name) if "." in name else _registered(name)
        _require_arguments(name, self.function, given)
        self.arguments = {key: part_of(argument, spec) for key, argument in given.items()}

    def __call__(self, rows: Tensors, end: End = "next_obs") -> Tensor:
        """Weighted values [N] (float32)."""
        given = {k: v(rows, end) if callable(v) else v for k, v in self.arguments.items()}
        return self.weight * self.function(**given).float()


def part_of(argument: Any, spec: Spec) -> Part | Any:
    """What picks an argument from rows; an argument that is no text or list stays what it is."""
    if isinstance(argument, list | tuple):
        constant = torch.tensor(argument, dtype=torch.float32)
        return lambda rows, end: constant.to(rows["reward"].device).expand(len(rows["reward"]), -1)
    if not isinstance(argument, str):
        return argument
    if argument in ("action", "reward", "discount"):
        return lambda rows, end: _matrix(rows[argument])
    leaf, index = _elements(argument, spec)
    if index is None:
        return lambda rows, end: _matrix(rows[f"{end}/{leaf}"])
    return lambda rows, end: _matrix(rows[f"{end}/{leaf}"])[:, index]


def _elements(text: str, spec: Spec) -> tuple[str, list[int] | None]:
    """The leaf that `text` is about and which elements of it (None: all)."""
    if found := SLICE.fullmatch(text):
        leaf, first = found["leaf"], int(found["first"])
        last = first + 1 if found["last"] is None else int(found["last"])
        if leaf not in spec.obs or not first < last <= spec.obs[leaf].size:
            shown = {name: list(each.shape) for name, each in spec.obs.items()}
            raise ConfigError(f"{text} is not in the observations {shown}")
        return leaf, list(range(first, last))
    if text in spec.obs:
        return text, None
    for names in (text.split(","), [f"{text}_{axis}" for axis in "xyz"]):
        for leaf, each in spec.obs.items():
            if each.names and all(name.strip() in each.names for name in names):
                return leaf, [each.names.index(name.strip()) for name in names]
    known = {re.sub("_[xyz]$", "", name) for leaf in spec.obs.values() for name in leaf.names}
    raise ConfigError(
        f'nothing that is observed is called "{text}"{nearest(text, [*known, *spec.obs])}; '
        "elements of a leaf without names: LEAF[FIRST:LAST]"
    )


def _matrix(values: Tensor) -> Tensor:
    return values.float().reshape(len(values), math.prod(values.shape[1:]))


def _registered(name: str) -> Callable[..., Tensor]:
    if name not in REGISTRY:
        raise ConfigError(f'there is no factor "{name}"{nearest(name, REGISTRY)}')
    return REGISTRY[name]


def _require_arguments(
    name: str, function: Callable[..., Tensor], given: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters)
        raise ConfigError(f"factor {name}({takes}): {error} (KEY=null leaves one out)") from error


REGISTRY: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (distance, near, proximity, closeness, alignment, heading, effort, value, above)
}
