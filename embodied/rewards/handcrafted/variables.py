"""Variables: the parts of a transition that a reward program can use, by name.

An observation `state` with named elements is split into its parts: tool_x, tool_y, tool_z are the
vector `tool` [N, 3], q1 ... q7 the vector `q` [N, 7], any other name a scalar such as `width` [N].
Each exists before (`tool`) and after the step (`next_tool`). The environment's reward, success and
the time are not available.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors

AXES = re.compile(r"(.+)_([xyz])")
NUMBERED = re.compile(r"([A-Za-z]+(?:_[A-Za-z]+)*?)_?(\d+)")
ACTION = "action"
NEXT = "next_"


@dataclass(frozen=True)
class Variable:
    """A named part of a transition: the elements `at` of observation `leaf` (None: all), of `shape`
    per transition."""

    name: str
    leaf: str
    shape: tuple[int, ...]
    at: tuple[int, ...] | None
    unit: str
    names: tuple[str, ...] = ()
    low: object = None
    high: object = None
    dtype: str = "float32"

    @property
    def is_point(self) -> bool:
        """Whether it is a position or a displacement in space."""
        return self.shape == (3,) and len(self.names) == 3 and self.names[0].endswith("_x")

    def of(self, transitions: Tensors, end: str) -> Tensor:
        """Its values [N, *shape] in transitions; `end` is "obs" or "next_obs"."""
        value = transitions[ACTION] if self.leaf == ACTION else transitions[f"{end}/{self.leaf}"]
        if self.at is None:
            return value
        if not self.shape:
            return value[:, self.at[0]]
        first, last = self.at[0], self.at[-1] + 1
        if last - first == len(self.at):
            return value[:, first:last]
        return value[:, list(self.at)]


def variables(spec: Spec) -> dict[str, Variable]:
    """All variables by name, without the `next_` ones; the action is `action`."""
    found: dict[str, Variable] = {}
    for name, leaf in spec.obs.items():
        whole = _identifier(name)
        found.setdefault(whole, _whole(whole, name, leaf))
        for part in _parts(name, leaf):
            found.setdefault(part.name, part)
    found[ACTION] = _whole(ACTION, ACTION, spec.act)
    return found


def known(spec: Spec) -> list[str]:
    """All names that a program may use as parameters."""
    names = list(variables(spec))
    return names + [NEXT + name for name in names if name != ACTION]


def inputs(found: Mapping[str, Variable], names: tuple[str, ...], transitions: Tensors) -> Tensors:
    """The values of a program's parameters `names`."""
    return {name: value(found, name, transitions) for name in names}


def value(found: Mapping[str, Variable], name: str, transitions: Tensors) -> Tensor:
    """One variable [N, ...]; names starting with `next_` are taken after the step."""
    if name in found:
        return found[name].of(transitions, "obs")
    return found[name.removeprefix(NEXT)].of(transitions, "next_obs")


def random_transitions(spec: Spec, count: int, seed: int = 0) -> Tensors:
    """Random transitions within the bounds of `spec`, to test a program without an environment."""
    generator = torch.Generator().manual_seed(seed)
    rows: Tensors = {ACTION: _sample(spec.act, count, generator)}
    for name, leaf in spec.obs.items():
        rows[f"obs/{name}"] = _sample(leaf, count, generator)
        rows[f"next_obs/{name}"] = _sample(leaf, count, generator)
    return rows


def _sample(leaf: Leaf, count: int, generator: torch.Generator) -> Tensor:
    shape = (count, *leaf.shape)
    if leaf.dtype == "float32":
        low, high = (_bound(bound, leaf, sign) for bound, sign in ((leaf.low, -1), (leaf.high, 1)))
        return low + (high - low) * torch.rand(shape, generator=generator)
    highs = leaf.high if isinstance(leaf.high, tuple) else (leaf.high,)
    most = 1 if None in highs else int(min(h for h in highs if h is not None))
    drawn = torch.randint(0, most + 1, shape, generator=generator)
    return drawn.to(getattr(torch, leaf.dtype))


def _bound(bound: object, leaf: Leaf, sign: int) -> Tensor:
    numbers = torch.tensor(float(sign) if bound is None else bound, dtype=torch.float32)
    return numbers.clamp(-10, 10).expand(leaf.size).reshape(leaf.shape)


def _whole(name: str, leaf_name: str, leaf: Leaf) -> Variable:
    return Variable(
        name, leaf_name, leaf.shape, None, leaf.unit, leaf.names, leaf.low, leaf.high, leaf.dtype
    )


def _parts(name: str, leaf: Leaf) -> list[Variable]:
    """The named parts of a vector, in the order of their first elements."""
    if len(leaf.shape) != 1 or len(leaf.names) != leaf.size:
        return []
    groups: dict[str, list[int]] = {}
    for at, element in enumerate(leaf.names):
        axes, numbered = AXES.fullmatch(element), NUMBERED.fullmatch(element)
        stem = axes[1] if axes else numbered[1] if numbered else element
        groups.setdefault(_identifier(stem), []).append(at)
    return [
        Variable(
            stem,
            name,
            () if len(at) == 1 and stem == _identifier(leaf.names[at[0]]) else (len(at),),
            tuple(at),
            leaf.unit,
            tuple(leaf.names[i] for i in at),
            dtype=leaf.dtype,
        )
        for stem, at in groups.items()
    ]


def _identifier(name: str) -> str:
    """`name` as a Python identifier."""
    plain = re.sub(r"\W", "_", name).lstrip("_")
    return plain if plain and not plain[0].isdigit() else f"leaf_{plain}"
