"""Mapping: names and units of a dataset or policy, and those of an environment or robot.

    obs:
      front: observation.images.top          # here: there
      state: {name: observation.state, scale: 0.0174533}    # here = there * scale + offset
      joints: {name: observation.state, scale: [0.0175, -0.0175, 7e-4], elements: [q1, q2, width]}
    action: {low: [-90, -90, 0], high: [90, 90, 100]}       # there: the values of -1 and +1 here

`scale` and `offset` are one number, or one for each element. `elements` are the names here of the
elements there, in the order there. `action` may also be `{scale: [...], offset: [...]}` (here =
there * scale + offset), and `quantiles` (default) or `minmax`: the range then comes from the
dataset's statistics. It may have `elements`, too. "Here" is the environment or robot, whose actions
are in [-1, 1] unless its controller takes physical ones; "there" is the dataset or the policy, in
physical units.

Elements whose names are the same here and there are matched by name, whatever their order. Where
both sides name them otherwise, `elements` have to say which is which.

The ranges are measured on the episodes of the run. Those in meta/stats.json are not used: as
LeRobot writes them, the quantiles of a dataset are averages of its episodes' quantiles, which are
narrower than the data wherever episodes differ.
"""

from __future__ import annotations

import collections.abc as abc
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.affine import Affine, last_dims
from embodied.core.build import ConfigError, nearest, shown, typed
from embodied.core.saved_node import parse_yaml
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest, under

if TYPE_CHECKING:  # pyarrow
    from embodied.datasets.lerobot.reader import Episodes

Range = Literal["quantiles", "minmax"]
RANGES = ("quantiles", "minmax")
PREFIXES = ("observation.images.", "observation.", "obs/")


Each = float | tuple[float, ...]  # one number for all elements, or one for each


@dataclass(frozen=True)
class Source:
    """`name`: the observation there, without LeRobot's prefix; here = there * scale + offset.

    `elements`: the names here of its elements, in the order there (`embodied deploy`); an
    environment knows them. `order`: for each element here its place there (empty: the same).
    """

    name: str
    scale: Each = 1.0
    offset: Each = 0.0
    elements: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def same_units(self) -> bool:
        return self.scale == 1.0 and self.offset == 0.0

    def here(self, value: Tensor) -> Tensor:
        """Values [..., *shape] there as those of here."""
        if not self.same_units:
            value = value * _row(self.scale, value) + _row(self.offset, value)
        return permuted(value, self.order)

    def there(self, value: Tensor) -> Tensor:
        """The inverse of `here`."""
        value = permuted(value, inverse_order(self.order))
        if self.same_units:
            return value
        return (value - _row(self.offset, value)) / _row(self.scale, value)


@dataclass(frozen=True)
class Mapping:
    """`obs`: for each name here, its source there; a name that is not listed is the same there.
    `action`: the values there that are -1 and +1 here, or how to measure them; `action_elements`:
    the names here of the action's elements, in the order there (empty: their own names)."""

    obs: abc.Mapping[str, Source] = field(default_factory=dict[str, Source])
    action: Affine | Range = "quantiles"
    action_elements: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path | str) -> Mapping:
        try:
            text = Path(path).read_text()
        except FileNotFoundError as error:
            raise ConfigError(f"there is no mapping file {path}: mapping=FILE.yaml") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
        return cls.parse(parse_yaml(text, str(path)), str(path))

    @classmethod
    def parse(cls, node: Any, where: str = "mapping") -> Mapping:
        """The mapping of plain settings; `where` begins the line of a ConfigError."""
        if not isinstance(node, abc.Mapping):
            raise ConfigError(f"{where} should hold `obs:` and `action:`, not {shown(node)}")
        settings = cast(abc.Mapping[str, Any], node)
        _require_known(settings, ("obs", "action"), where)
        obs = settings.get("obs") or {}
        if not isinstance(obs, abc.Mapping):
            raise ConfigError(f"{where}: obs should be NAME_HERE: NAME_THERE, not {shown(obs)}")
        names = cast(abc.Mapping[str, Any], obs)
        sources = {
            str(name): _source(given, f"{where}: obs.{name}") for name, given in names.items()
        }
        return cls(sources, *_action(settings.get("action") or "quantiles", where))

    def to_json(self) -> dict[str, Any]:
        """The plain settings that `parse` reads."""
        action = self.action.to_json() if isinstance(self.action, Affine) else self.action
        if self.action_elements:
            whole = action if isinstance(action, dict) else {"range": action}
            action = {**whole, "elements": list(self.action_elements)}
        obs: dict[str, dict[str, Any]] = {}
        for here, source in self.obs.items():
            scale, offset = (
                list(each) if isinstance(each, tuple) else each
                for each in (source.scale, source.offset)
            )
            obs[here] = {"name": source.name, "scale": scale, "offset": offset}
            if source.elements:
                obs[here]["elements"] = list(source.elements)
        return {"obs": obs, "action": action}

    def source(self, name: str) -> Source:
        return self.obs.get(name, Source(name))

    def obs_here(self, there: Tensors, names: abc.Iterable[str]) -> Tensors:
        """The observations `names` of here, from those of there."""
        sources = {name: self.source(name) for name in names}
        return {name: source.here(there[source.name]) for name, source in sources.items()}

    def obs_there(self, here: Tensors, names: abc.Iterable[str]) -> Tensors:
        """The observations of there that are made of `names` here; the inverse of `obs_here`."""
        sources = {name: self.source(name) for name in names}
        return {source.name: source.there(here[name]) for name, source in sources.items()}

    def ordered(self, here: Spec, there: Spec) -> Mapping:
        """This mapping with the order of elements by their names, for `here` and `there`.
        ConfigError as `action_order`."""
        obs: dict[str, Source] = dict(self.obs)
        for name, leaf in here.obs.items():
            source = self.source(name)
            if source.name in there.obs and not leaf.is_picture:
                theirs = source.elements or there.obs[source.name].names
                if sorted(theirs) == sorted(leaf.names) and theirs != leaf.names:
                    obs[name] = replace(source, order=order_of(leaf.names, theirs))
                elif theirs != leaf.names and len(theirs) == len(leaf.names):
                    raise ConfigError(
                        f"mapping: obs.{name} is {', '.join(leaf.names)} here and "
                        f"{', '.join(theirs)} there: write {name}: {{name: {source.name}, "
                        "elements: [...]} with the names here, in the order there"
                    )
        return replace(self, obs=obs)

    def action_order(self, here: Leaf, there: Leaf) -> tuple[int, ...]:
        """For each element of the action here its place there; empty where it is the same.
        ConfigError where the two have different names and `elements` do not say which is which."""
        theirs = self.action_elements or there.names
        if not theirs or not here.names or theirs == here.names:
            return ()
        if sorted(theirs) != sorted(here.names):
            raise ConfigError(
                f"the action is {', '.join(here.names)} here and {', '.join(theirs)} there: write "
                "action: {elements: [...]} with the names here, in the order there"
            )
        return order_of(here.names, theirs)


def short(name: str) -> str:
    """An observation's name without LeRobot's prefix: `top` of `observation.images.top`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def order_of(here: abc.Sequence[str], there: abc.Sequence[str]) -> tuple[int, ...]:
    """For each name of `here` its place in `there`, which has the same names."""
    return tuple(list(there).index(name) for name in here)


def inverse_order(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


def permuted(value: Tensor, order: tuple[int, ...]) -> Tensor:
    """Values [..., *shape] with the elements of `order`, one each (empty: as they are)."""
    if not order:
        return value
    shape = value.shape
    start = len(shape) - len(last_dims(tuple(shape), len(order)))
    return value.flatten(start)[..., list(order)].reshape(shape)


def _row(numbers: Each, value: Tensor) -> Tensor | float:
    """`numbers` in the shape of one row of `value`."""
    if not isinstance(numbers, tuple):
        return numbers
    kind = value.dtype if value.is_floating_point() else torch.float32
    row = torch.tensor(numbers, dtype=kind, device=value.device)
    return row.view(last_dims(tuple(value.shape), len(numbers)))


def _require_known(node: abc.Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in node:
        if key not in known:
            raise ConfigError(f'{where} has no setting "{key}"{nearest(str(key), known)}')


def _source(given: Any, where: str) -> Source:
    if isinstance(given, str):
        return Source(short(given))
    if not isinstance(given, abc.Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(
            f"{where} should be a name there, or {{name: ..., scale: ..., offset: ...}}"
        )
    node = cast(abc.Mapping[str, Any], given)
    _require_known(node, ("name", "scale", "offset", "elements"), where)
    scale, offset = _each(node.get("scale", 1.0), where), _each(node.get("offset", 0.0), where)
    if 0 in (scale if isinstance(scale, tuple) else (scale,)):
        raise ConfigError(f"{where}: scale should not be 0")
    return Source(short(node["name"]), scale, offset, _elements(node, where))


def _each(given: Any, where: str) -> Each:
    """One number or one for each element; ConfigError."""
    several = isinstance(given, list | tuple)
    try:
        numbers = [typed(float, each, where) for each in (given if several else [given])]
    except ConfigError:
        numbers = []
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"{where}: scale and offset should be numbers, one or one per element")
    return tuple(numbers) if several else numbers[0]


def _elements(node: abc.Mapping[str, Any], where: str) -> tuple[str, ...]:
    elements = node.get("elements") or []
    if not isinstance(elements, list) or not all(isinstance(e, str) for e in elements):
        raise ConfigError(f"{where}: elements should be a list of names")
    names = tuple(str(e) for e in cast(list[str], elements))
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: elements should have different names")
    return names


def _action(given: Any, where: str) -> tuple[Affine | Range, tuple[str, ...]]:
    """The range of the action, and the names here of its elements."""
    if isinstance(given, str) and given in RANGES:
        return cast(Range, given), ()
    node = cast(abc.Mapping[str, Any], given) if isinstance(given, abc.Mapping) else {}
    elements = _elements(node, f"{where}: action")
    kinds = {*node} - {"elements"}
    if not kinds and elements:
        return "quantiles", elements
    if kinds == {"range"} and node["range"] in RANGES:
        return cast(Range, node["range"]), elements
    try:
        if kinds == {"low", "high"}:
            return Affine.from_json(node), elements
        if kinds in ({"scale"}, {"scale", "offset"}):
            return _of_scale(node, f"{where}: action"), elements
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: action: {error}") from error
    raise ConfigError(
        f"{where}: action should be {{low: [...], high: [...]}} (the values there of -1 and +1 "
        f"here), {{scale: [...], offset: [...]}}, quantiles or minmax, not {shown(given)}"
    )


def _of_scale(node: abc.Mapping[str, Any], where: str) -> Affine:
    """The values there of -1 and +1, of here = there * scale + offset."""
    scale, offset = _each(node["scale"], where), _each(node.get("offset", 0.0), where)
    if not isinstance(scale, tuple) or 0 in scale:
        raise ConfigError(f"{where}: scale should be a list of numbers that are not 0")
    offsets = offset if isinstance(offset, tuple) else (offset,) * len(scale)
    if len(offsets) != len(scale):
        raise ConfigError(f"{where}: {len(scale)} scales and {len(offsets)} offsets")
    low, high = (
        tuple((end - b) / a for a, b in zip(scale, offsets, strict=True)) for end in (-1.0, 1.0)
    )
    return Affine(low, high)


def require_names(here: Spec, mapping: Mapping) -> None:
    """ConfigError for a name of the mapping that is not an observation of `here`, or has another
    number of elements."""
    for name, source in mapping.obs.items():
        if name not in here.obs:
            raise ConfigError(
                f"mapping: obs.{name} is no observation here{nearest(name, here.obs)}"
            )
        for what, numbers in (("scale", source.scale), ("offset", source.offset)):
            if isinstance(numbers, tuple) and len(numbers) != here.obs[name].size:
                raise ConfigError(
                    f"mapping: obs.{name}.{what} has {len(numbers)} numbers, the observation "
                    f"{here.obs[name].size}"
                )
        ours = here.obs[name].names
        if source.elements and ours and sorted(source.elements) != sorted(ours):
            raise ConfigError(
                f"mapping: obs.{name}.elements are {', '.join(source.elements)}, the observation "
                f"has {', '.join(ours)}"
            )


def require_fit(name: str, here: Spec, source: str, there: Spec) -> None:
    """ConfigError unless the observation `source` of `there` can be `name` of `here`."""
    ours, theirs = here.obs[name], there.obs[source]
    if ours.is_picture and theirs.is_picture and ours.shape != theirs.shape:
        height, width = theirs.shape[:2]
        raise ConfigError(
            f"mapping: obs.{name} is a picture {said(ours)} here and {source} is {said(theirs)} "
            f"there: render it as {height} x {width} here, or choose another picture"
        )
    kinds = [
        (leaf.is_image, leaf.is_depth, leaf.is_symbol, leaf.is_points) for leaf in (ours, theirs)
    ]
    if ours.size != theirs.size or kinds[0] != kinds[1]:
        raise ConfigError(
            f"mapping: obs.{name} is {said(ours)} here and {source} is {said(theirs)} there; write "
            f"{name}: NAME with another one (there: {listed(there)})"
        )


def require_actions(here: Spec, there: Spec, mapping: Mapping) -> None:
    """ConfigError unless actions have the same size, choices, names and rate, and the range fits
    them."""
    ours, theirs = here.act, there.act
    names = f" ({', '.join(theirs.names)})" if theirs.names else ""
    kinds = [(act.size, act.dtype, act.classes) for act in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"the action is {said(ours)} here and {said(theirs)}{names} there: no mapping can join "
            "them"
        )
    if isinstance(mapping.action, Affine) and not ours.is_continuous:
        raise ConfigError("mapping: action has no range where it is a choice: leave it out")
    if isinstance(mapping.action, Affine) and mapping.action.size != ours.size:
        raise ConfigError(
            f"mapping: action.low and action.high should have {ours.size} numbers{names}, not "
            f"{mapping.action.size}"
        )
    mapping.action_order(ours, theirs)
    if abs(here.dt - there.dt) > 1e-3 * here.dt:
        raise ConfigError(
            f"there are {1 / here.dt:g} steps a second here and {1 / there.dt:g} there, and an "
            "action would last another time: record at this rate, or set the rate here"
        )


def required_source(name: str, here: Spec, there: Spec, mapping: Mapping) -> str:
    """The observation of `there` that is `name` of `here`; ConfigError if there is none."""
    source = mapping.source(name).name
    if source not in there.obs:
        raise ConfigError(
            f"mapping: there is no {source} for {name} {said(here.obs[name])}"
            f"{nearest(source, there.obs)}; write {name}: NAME_THERE below obs"
        )
    require_fit(name, here, source, there)
    return source


def said(leaf: Leaf) -> str:
    """A leaf's type and shape, and the classes of its choices: `float32[6]`."""
    classes = f" of {list(leaf.classes)} classes (0: a number)" if leaf.classes else ""
    return f"{leaf.dtype}{list(leaf.shape)}{classes}"


def listed(spec: Spec) -> str:
    return ", ".join(f"{name} {said(leaf)}" for name, leaf in spec.obs.items())


Numbers = NDArray[np.float64]
NOISE = 1e-4  # a smaller range, relative to the values (1 or more), is that of measurement noise

# What is -1 and +1: the 1% and 99% quantiles; the extremes; mean -+ standard deviation.
Statistics = Literal["quantiles", "minmax", "mean_std"]


def measured(values: Tensor, how: Statistics = "quantiles") -> Affine:
    """The map of `values` [N, *shape], per element. An element whose quantiles are equal (a gripper
    that hardly ever closes) gets its extremes, and one that never changes by more than noise keeps
    its scale: normalised with the noise, another value would be thousands."""
    numbers = values.reshape(len(values), -1).double().cpu().numpy()
    low, high = numbers.min(0), numbers.max(0)
    if how == "quantiles":
        inner = np.quantile(numbers, (0.01, 0.99), axis=0)
        varies = _varies(*inner)
        low, high = np.where(varies, inner[0], low), np.where(varies, inner[1], high)
    elif how == "mean_std":
        mean, std = numbers.mean(0), numbers.std(0)
        low, high = mean - std, mean + std
    middle, varies = (low + high) / 2, _varies(low, high)
    low, high = np.where(varies, low, middle), np.where(varies, high, middle)
    return Affine.of_range(low.tolist(), high.tolist())


def _varies(low: Numbers, high: Numbers) -> NDArray[np.bool_]:
    return high - low > NOISE * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))


def outside(values: Tensor) -> float:
    """The share of the elements of `values` that are beyond -1 or +1, by more than rounding."""
    return float((values.abs() > 1 + 1e-4).float().mean())


MOST_OUTSIDE = 0.2  # a larger share of actions beyond +-1: the mapping's range is not the data's


def remapped(
    datasets: abc.Mapping[str, Episodes], here: Spec, mapping: Mapping
) -> dict[str, Episodes]:
    """Datasets by their names, with the observations of `here` and actions whose -1 and +1 are the
    mapping's: a range that is measured is that of all `datasets`. Nothing is clamped: actions
    beyond the range are beyond +-1. ConfigError, which begins with the name of a dataset, if
    something is missing, has another shape or another unit."""
    made: dict[str, Episodes] = {}
    for name, part in datasets.items():
        try:
            require_names(here, mapping)
            require_actions(here, part.spec, mapping)
            for each in here.obs:
                required_source(each, here, part.spec, mapping)
            ordered = mapping.ordered(here, part.spec)
            order = mapping.action_order(here.act, part.spec.act)
            action = permuted(_given_units(part.steps["action"], mapping), order)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        seen = _shaped(ordered.obs_here(under(part.steps, "obs"), here.obs), here)
        final = _shaped(ordered.obs_here(part.final, here.obs), here)
        rest = {k: v for k, v in part.steps.items() if not k.startswith("obs/")}
        steps = {**nest(seen, "obs"), **rest, "action": action.reshape(-1, *here.act.shape)}
        spec = replace(here, text=part.spec.text)
        made[name] = replace(part, spec=spec, steps=steps, final=final)
    if made and here.act.is_continuous and not isinstance(mapping.action, Affine):
        by = measured(torch.cat([part.steps["action"] for part in made.values()]), mapping.action)
        for part in made.values():
            part.steps["action"] = by.to_unit(part.steps["action"].float())
    return made


def _given_units(values: Tensor, mapping: Mapping) -> Tensor:
    """Actions [N, *shape] in the units of here where the mapping gives their range; ConfigError
    where most of them are beyond +-1."""
    if not isinstance(mapping.action, Affine):
        return values
    unit = mapping.action.to_unit(values.float())
    if outside(unit) > MOST_OUTSIDE:
        found = measured(values, "minmax")
        low, high = ([round(n, 4) for n in numbers] for numbers in (found.low, found.high))
        raise ConfigError(
            f"{outside(unit):.0%} of the actions are beyond the mapping's action.low and "
            f"action.high, which should be the values there of -1 and +1 here; the data go from "
            f"{low} to {high}"
        )
    return unit


def _shaped(obs: Tensors, here: Spec) -> Tensors:
    """Numbers in the shape of here's leaves; pictures have it already."""
    return {
        name: value if here.obs[name].is_picture else value.reshape(-1, *here.obs[name].shape)
        for name, value in obs.items()
    }
