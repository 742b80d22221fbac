"""Spec: what environments, policies, checkpoints and robots must agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

Bound = float | tuple[float, ...] | None
SYMBOL = "symbol"  # the unit of numbers that are names
POINTS = "points"  # the unit of sets of points: metres, and colours in [0, 1] beside them
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_ZERO = (None, 0)


class SpecMismatch(ValueError):
    """Two sides that should speak of the same observations and actions do not."""


@dataclass(frozen=True)
class Leaf:
    """One named array without its batch dimension.

    `shape` per row; `dtype` a torch name ("float32", "uint8", "int64"); `low` and `high` one number
    or one per element (None: unbounded); `unit` for people ("m", "rad"); `names` one per element of
    a vector, where they are known (joint names, "x", "y").

    Continuous actions are in [-1, 1]; discrete actions are shape `()`, dtype "int64", from 0 to
    `high` inclusive. Images are uint8, height x width x channels.

    An integer leaf of the unit "symbol" holds names written as numbers (the kind of a cell, a word,
    a direction): whole numbers from 0 to `high` inclusive, one `high` for all elements or one per
    element of the flattened leaf. Symbols have no order: they are never an image, never normalised,
    and encoders see each of them one-hot.

    A float32 leaf [N, 3 or 6] of the unit "points" is a set of points: x, y, z in metres, and red,
    green, blue in [0, 1] where there are six. Their order means nothing, to encoders either.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: Bound = None
    high: Bound = None
    unit: str = ""
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements in one row."""
        return math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        return self.dtype == "uint8" and len(self.shape) == 3 and not self.is_symbol

    @property
    def is_symbol(self) -> bool:
        return self.unit == SYMBOL and self.dtype in INTEGERS

    @property
    def is_points(self) -> bool:
        return self.unit == POINTS and self.dtype == "float32" and self.shape[1:] in ((3,), (6,))

    @property
    def symbols(self) -> tuple[int, ...]:
        """How many different symbols each element of the flattened leaf can be: its high + 1.

        ValueError when this is not a leaf of symbols, or their number is not known.
        """
        highs = self.high if isinstance(self.high, tuple) else (self.high,) * self.size
        if not self.is_symbol or None in highs or len(highs) != self.size or self.low not in _ZERO:
            raise ValueError(
                f"not a leaf of symbols: {_shown(self)}, unit {self.unit!r}; it needs an integer "
                f'dtype, unit="{SYMBOL}", low=0, and one high or one for each of {self.size}'
            )
        return tuple(int(cast(float, high)) + 1 for high in highs)

    def zeros(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """A zero tensor [n, *shape] of this leaf's dtype."""
        return torch.zeros(n, *self.shape, dtype=getattr(torch, self.dtype), device=device)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "low": _listed(self.low),
            "high": _listed(self.high),
            "unit": self.unit,
            "names": list(self.names),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Leaf:
        return cls(
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            low=_tupled(data["low"]),
            high=_tupled(data["high"]),
            unit=data["unit"],
            names=tuple(data["names"]),
        )


@dataclass(frozen=True)
class Spec:
    """Observations by name, one action, the control period `dt` (s), the task vector if there is
    one, and `text`: the sentence that says what the task is."""

    obs: Mapping[str, Leaf]
    act: Leaf
    dt: float
    task: Leaf | None = None
    text: str = field(default="", compare=False)

    def with_act(self, act: Leaf) -> Spec:
        """The same world seen by something that acts in another space (latent noise, residual)."""
        return replace(self, act=act)

    def with_obs(self, **extra: Leaf) -> Spec:
        """The same world with more observations."""
        return replace(self, obs={**self.obs, **extra})

    def to_json(self) -> dict[str, Any]:
        return {
            "obs": {name: leaf.to_json() for name, leaf in self.obs.items()},
            "act": self.act.to_json(),
            "dt": self.dt,
            "task": None if self.task is None else self.task.to_json(),
            "text": self.text,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        task = data["task"]
        return cls(
            obs={name: Leaf.from_json(leaf) for name, leaf in data["obs"].items()},
            act=Leaf.from_json(data["act"]),
            dt=data["dt"],
            task=None if task is None else Leaf.from_json(task),
            text=data.get("text", ""),
        )


def require_same(here: Spec, there: Spec, here_name: str, there_name: str) -> None:
    """Raise SpecMismatch that prints both sides of every difference, or return.

    Names of elements and units are for people and are not compared, but a symbol is no number; a
    task vector only matters to who hands out tasks. `dt` is compared to a part in a million.
    """
    lines: list[str] = []
    for name in sorted({*here.obs, *there.obs}):
        lines += _difference(f"obs/{name}", here.obs.get(name), there.obs.get(name))
    lines += _difference("act", here.act, there.act)
    if not math.isclose(here.dt, there.dt, rel_tol=1e-6):
        lines.append(f"dt: {here.dt} s | {there.dt} s")
    if lines:
        sides = "; ".join(lines)
        raise SpecMismatch(
            f"{here_name} and {there_name} do not fit ({here_name} | {there_name}): {sides}"
        )


def _difference(name: str, here: Leaf | None, there: Leaf | None) -> list[str]:
    same = (
        here is not None
        and there is not None
        and (here.shape, here.dtype, here.low, here.high, here.is_symbol)
        == (there.shape, there.dtype, there.low, there.high, there.is_symbol)
    )
    return [] if same else [f"{name}: {_shown(here)} | {_shown(there)}"]


def _shown(leaf: Leaf | None) -> str:
    if leaf is None:
        return "absent"
    bounds = "" if leaf.low is None and leaf.high is None else f" in [{leaf.low}, {leaf.high}]"
    kind = " (symbols)" if leaf.is_symbol else ""
    return f"{leaf.dtype}{list(leaf.shape)}{kind}{bounds}"


def _listed(bound: Bound) -> float | list[float] | None:
    return list(bound) if isinstance(bound, tuple) else bound


def _tupled(bound: Any) -> Bound:
    return tuple(cast(list[float], bound)) if isinstance(bound, list) else bound
