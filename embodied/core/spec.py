"""Spec: observation and action spaces that environments, policies and robots must agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:  # the processes that control an arm have no torch
    import torch
    from torch import Tensor

Bound = float | tuple[float, ...] | None
SYMBOL = "symbol"  # unit of categorical integers
TEXT = "text"  # unit of sentences as UTF-8 bytes (embodied.core.text)
POINTS = "points"  # unit of point clouds: positions in metres, optional colours in [0, 1]
DEPTH = "depth"  # unit of pictures of distances in metres
INSTRUCTION = "instruction"  # observation: which of `Spec.tasks` a policy is to do
SENTENCE = "sentence"  # unit of a sentence's vector (embodied.nn.sentences)
NORMALIZED = "normalized"  # unit of values that a wrapper has normalised, mostly in [-1, 1]
TASK_NUMBER = "task_number"  # observation: which of several tasks of one environment it is
MASK = "action_mask"  # observation: which choices of the action are allowed now (`core.choices`)
BEST_ACTION = "privileged/best_action"  # observation: what who knows the task would do now
LAST_ACTION = "last_action"  # observation in lifetimes of episodes: the action before
LAST_REWARD = "last_reward"  # observation in lifetimes of episodes: the reward before
FIRST = "first"  # observation in lifetimes of episodes: 1 at the start of an inner episode
DEMONSTRATOR = "privileged/demonstrator"  # observation for demonstrators only: never recorded
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = (*INTEGERS, "uint16", "uint32", "uint64", "bool", "float16", "float32", "float64")
MOST = 2**28  # elements of a leaf
_ZERO = (None, 0)


class SpecMismatch(ValueError):
    """Two specs that must be equal (policy and environment, ...) differ."""


@dataclass(frozen=True)
class Leaf:
    """One named array without its batch dimension.

    `dtype`: a torch name ("float32", "uint8", "int64"); `low`, `high`: one number or one per
    element (None: unbounded); `unit`: for display ("m", "rad"); `names`: one per element of a
    vector, if known (joint names, "x", "y").

    Continuous actions are in [-1, 1]; discrete actions are shape `()`, dtype "int64", from 0 to
    `high` inclusive. An action of several choices, or of choices and numbers, is float32 [A] with
    `classes`: how many classes each element chooses from, 0 for a number in [-1, 1] (`mixed_leaf`).
    Images are uint8 [H, W, C]. These units change what a leaf is:

    "symbol": integers without an order (the kind of a cell, a word) from 0 to `high` inclusive, one
    `high` for all elements or one each; encoders use one-hot vectors. "text": uint8 [N], a sentence
    as UTF-8 bytes, zero after its end (`core.text`). "points": float32 [N, 3 or 6], a cloud of x,
    y, z in m, then optionally red, green, blue in [0, 1], whose order means nothing. "depth":
    float32 [H, W, 1], distances in m, 0 where none was measured. "normalized": values that a
    wrapper normalised (`policies.wrappers.translated`), most in [-1, 1]; they are neither
    normalised again nor clamped, and `low` and `high` tell how far the data reach.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: Bound = None
    high: Bound = None
    unit: str = ""
    names: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    frames: int = field(default=1, compare=False)  # pictures stacked along the channels

    @property
    def size(self) -> int:
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
    def is_depth(self) -> bool:
        return self.unit == DEPTH and self.dtype == "float32" and len(self.shape) == 3

    @property
    def is_picture(self) -> bool:
        return self.is_image or self.is_depth

    @property
    def is_normalized(self) -> bool:
        return self.unit == NORMALIZED and self.dtype == "float32"

    @property
    def is_unit(self) -> bool:
        """Whether every element is in [-1, 1]; what has other bounds, or none, is not."""
        low, high = (end if isinstance(end, tuple) else (end,) for end in (self.low, self.high))
        return set(low) == {-1} and set(high) == {1}

    @property
    def choices(self) -> tuple[int, ...]:
        """Of an action: the number of classes of each element, 0 for a number."""
        if self.dtype == "int64" and isinstance(self.high, int | float):
            return (int(self.high) + 1,) * self.size
        return self.classes or (0,) * self.size

    @property
    def is_continuous(self) -> bool:
        """Of an action: whether every element is a number."""
        return self.dtype == "float32" and not any(self.classes)

    def bounded(self, x: Tensor) -> Tensor:
        """`x`, clamped to [-1, 1] as an action of a policy is; normalised values are not clamped
        (a wrapper turns them into physical ones)."""
        return x if self.is_normalized else x.clamp(-1, 1)

    @property
    def is_text(self) -> bool:
        return self.unit == TEXT and self.dtype == "uint8" and len(self.shape) == 1

    @property
    def symbols(self) -> tuple[int, ...]:
        """The number of symbols of each element of the flattened leaf: its high + 1. ValueError if
        this is not a leaf of symbols, or their number is not known."""
        highs = self.high if isinstance(self.high, tuple) else (self.high,) * self.size
        if not self.is_symbol or None in highs or len(highs) != self.size or self.low not in _ZERO:
            raise ValueError(
                f"not a leaf of symbols: {_shown(self)}, unit {self.unit!r}; it needs an integer "
                f'dtype, unit="{SYMBOL}", low=0, and one high or one for each of {self.size}'
            )
        return tuple(int(cast(float, high)) + 1 for high in highs)

    def zeros(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """A zero tensor [n, *shape] of this leaf's dtype."""
        import torch

        return torch.zeros(n, *self.shape, dtype=getattr(torch, self.dtype), device=device)

    def sample(self, n: int) -> Tensor:
        """Random values [n, *shape] within the bounds; if unbounded, normal with std 3."""
        import torch

        kind: torch.dtype = getattr(torch, self.dtype)
        if self.is_symbol:
            count = torch.tensor(self.symbols)
            values = (torch.rand(n, self.size) * count).long().clamp(max=count - 1)
            return values.view(n, *self.shape).to(kind)
        if self.classes:
            count, uniform = torch.tensor(self.classes), torch.rand(n, self.size)
            return torch.where(count > 0, (uniform * count).floor(), 2 * uniform - 1)
        if self.is_image:
            return torch.randint(256, (n, *self.shape)).to(torch.uint8)
        low, high = (
            torch.tensor(end if end is not None else sign * torch.inf)
            for end, sign in ((self.low, -1), (self.high, 1))
        )
        wide = (3 * torch.randn(n, self.size)).clamp(low, high)
        between = low + (high - low) * torch.rand(n, self.size)
        values = torch.where((high - low).isfinite(), between, wide)
        return values.view(n, *self.shape).to(kind)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "low": _listed(self.low),
            "high": _listed(self.high),
            "unit": self.unit,
            "names": list(self.names),
            "classes": list(self.classes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Leaf:
        shape, dtype = known(data["shape"], data["dtype"])
        names, classes = tuple(data["names"]), tuple(data.get("classes", ()))
        if not all(isinstance(text, str) for text in (data["unit"], *names)):
            raise ValueError("a unit, or the name of an element, is no text")
        if not all(type(count) is int and 0 <= count <= MOST for count in classes):
            raise ValueError("a number of classes is none")
        if classes and len(classes) != math.prod(shape):
            raise ValueError(f"{len(classes)} numbers of classes for the shape {shape}")
        return cls(
            shape=shape,
            dtype=dtype,
            low=_bound(data["low"], shape),
            high=_bound(data["high"], shape),
            unit=data["unit"],
            names=names,
            classes=classes,
        )


def mixed_leaf(classes: tuple[int, ...], names: tuple[str, ...] = ()) -> Leaf:
    """An action whose element i chooses from `classes[i]` classes, or is a number where that is 0;
    an ordinary continuous action where all are numbers."""
    if not any(classes):
        return Leaf((len(classes),), "float32", -1.0, 1.0, names=names)
    low = tuple(0.0 if count else -1.0 for count in classes)
    high = tuple(float(count - 1) if count else 1.0 for count in classes)
    return Leaf((len(classes),), "float32", low, high, names=names, classes=classes)


@dataclass(frozen=True)
class Spec:
    """Observations by name, the action, the control period `dt` (s), the task vector (if any), and
    `text`, the task instruction. `native` describes a foreign environment's own side
    (`embodied.core.native`).

    `tasks`: the sentences of data with more than one. The observation `instruction` is the number
    of one of them, or its vector, if the policy is to tell them apart.
    """

    obs: Mapping[str, Leaf]
    act: Leaf
    dt: float
    task: Leaf | None = None
    text: str = field(default="", compare=False)
    native: Mapping[str, Any] | None = field(default=None, compare=False)
    tasks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def listens(self) -> bool:
        """Whether the observation `instruction` chooses among `tasks`."""
        leaf = self.obs.get(INSTRUCTION)
        number = leaf is not None and leaf.is_symbol and leaf.shape == ()
        vector = leaf is not None and leaf.unit == SENTENCE
        return bool(self.tasks) and (number or vector)

    def with_act(self, act: Leaf) -> Spec:
        return replace(self, act=act)

    def with_obs(self, **extra: Leaf) -> Spec:
        return replace(self, obs={**self.obs, **extra})

    def transition_bytes(self, decision: int = 1, pictures: float | None = None) -> int:
        """About how many bytes a stored transition of `decision` steps has: both observations, the
        action, reward and discount; `pictures`: how many of each camera are new (None: all)."""
        size = 4.0 * max(self.act.size, 1) * decision + 8
        for leaf in self.obs.values():
            new = pictures / leaf.frames if pictures and leaf.is_picture else 2
            size += new * leaf.size * np.dtype(leaf.dtype).itemsize
        return int(size)

    def to_json(self) -> dict[str, Any]:
        return {
            "obs": {name: leaf.to_json() for name, leaf in self.obs.items()},
            "act": self.act.to_json(),
            "dt": self.dt,
            "task": None if self.task is None else self.task.to_json(),
            "text": self.text,
            "native": self.native,
            "tasks": list(self.tasks),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        task, dt, text = data["task"], data["dt"], data.get("text", "")
        if not isinstance(dt, int | float) or not 0 < dt < math.inf:
            raise ValueError(f"{dt!r:.40} is no control period (s)")
        if not all(isinstance(each, str) for each in (text, *data.get("tasks", ()))):
            raise ValueError("a task is no text")
        return cls(
            obs={name: Leaf.from_json(leaf) for name, leaf in data["obs"].items()},
            act=Leaf.from_json(data["act"]),
            dt=dt,
            task=None if task is None else Leaf.from_json(task),
            text=text,
            native=data.get("native"),
            tasks=tuple(data.get("tasks", ())),
        )


def known(shape: Any, dtype: Any) -> tuple[tuple[int, ...], str]:
    """The shape and type that a file gives a leaf. ValueError where no leaf can have them."""
    sizes = tuple(shape)
    whole = len(sizes) <= 8 and all(type(n) is int and 0 <= n <= MOST for n in sizes)
    if not whole or math.prod(sizes) > MOST or dtype not in DTYPES:
        raise ValueError(f"there are no numbers of the type {dtype!r:.40} and shape {sizes!s:.80}")
    return sizes, dtype


def hidden(name: str) -> bool:
    """Whether an observation is for critics and rewards only, not for policies, by its prefix."""
    return name.startswith(("critic/", "privileged/"))


def require_same(
    here: Spec,
    there: Spec,
    here_name: str,
    there_name: str,
    any_order: bool = False,
    part: bool = False,
) -> None:
    """Raise SpecMismatch, which lists every difference, if the specs differ. Of element names it is
    compared whether they are the same ones in another order (`any_order`: who asks joins them by
    name); other names and units may mean the same, except that symbols and numbers differ. Task
    vectors are not compared. `dt` is compared with a relative tolerance of 1e-6. With `part`,
    `there` may have fewer observations."""
    lines: list[str] = []
    names = sorted({*there.obs} if part else {*here.obs, *there.obs})
    pairs = {f"obs/{name}": (here.obs.get(name), there.obs.get(name)) for name in names}
    for name, (one, other) in {**pairs, "act": (here.act, there.act)}.items():
        lines += _difference(name, one, other, any_order)
    if not math.isclose(here.dt, there.dt, rel_tol=1e-6):
        lines.append(f"dt: {here.dt} s | {there.dt} s")
    if here.listens and there.listens and here.tasks != there.tasks:
        lines.append(f"tasks: {list(here.tasks)} | {list(there.tasks)}")
    if lines:
        sides = "; ".join(lines)
        raise SpecMismatch(
            f"{here_name} and {there_name} do not fit ({here_name} | {there_name}): {sides}"
        )


def _difference(name: str, here: Leaf | None, there: Leaf | None, any_order: bool) -> list[str]:
    if here is None or there is None or _kind(here) != _kind(there):
        return [f"{name}: {_shown(here)} | {_shown(there)}"]
    if any_order or not in_another_order(here, there):
        return []
    return [f"{name}: elements in another order, {list(here.names)} | {list(there.names)}"]


def _kind(leaf: Leaf) -> tuple[Any, ...]:
    bounds = (leaf.low, leaf.high, leaf.classes)
    return (leaf.shape, leaf.dtype, *bounds, leaf.is_symbol, leaf.is_depth)


def in_another_order(here: Leaf, there: Leaf) -> bool:
    """Whether the two have elements of the same names, in different places."""
    return here.names != there.names and sorted(here.names) == sorted(there.names)


def _shown(leaf: Leaf | None) -> str:
    if leaf is None:
        return "absent"
    bounds = "" if leaf.low is None and leaf.high is None else f" in [{leaf.low}, {leaf.high}]"
    kind = " (symbols)" if leaf.is_symbol else ""
    kind = f" (choices of {list(leaf.classes)})" if leaf.classes else kind
    return f"{leaf.dtype}{list(leaf.shape)}{kind}{bounds}"


def _listed(bound: Bound) -> float | list[float] | None:
    return list(bound) if isinstance(bound, tuple) else bound


def _bound(bound: Any, shape: tuple[int, ...]) -> Bound:
    """A bound that a file gives: none, a number, or one for each element. ValueError."""
    each = cast(list[Any], bound) if isinstance(bound, list | tuple) else [bound]
    single = not isinstance(bound, list | tuple)
    for number in each:
        plain = isinstance(number, int | float) and number == number
        if not plain and not (single and number is None):
            raise ValueError(f"{number!r:.40} is no bound of a number")
    if not single and len(each) != math.prod(shape):
        raise ValueError(f"{len(each)} bounds for the shape {shape}")
    return bound if single else tuple(each)
