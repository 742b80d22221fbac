"""Mapping: names and units of a dataset or policy, and those of an environment or robot.

    obs:
      front: observation.images.top          # here: there
      state: {name: observation.state, scale: 0.0174533}    # here = there * scale + offset
      joints: {name: observation.state, elements: [q1, q2, width]}   # a robot's own names of them
    action: {low: [-90, -90, 0], high: [90, 90, 100]}       # there: the values of -1 and +1 here

`action` may also be `quantiles` (default) or `minmax`: the range comes from the dataset's
statistics. "Here" is the environment or robot, whose actions are in [-1, 1]; "there" is the dataset
or the policy, in physical units.

The ranges are measured on the episodes of the run. Those in meta/stats.json are not used: as
LeRobot writes them, the quantiles of a dataset are averages of its episodes' quantiles, which are
narrower than the data wherever episodes differ.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.build import ConfigError, nearest, shown
from embodied.core.saved_node import parse_yaml
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest, under

if TYPE_CHECKING:  # pyarrow
    from embodied.datasets.lerobot.reader import Episodes

Range = Literal["quantiles", "minmax"]
RANGES = ("quantiles", "minmax")
PREFIXES = ("observation.images.", "observation.", "obs/")


@dataclass(frozen=True)
class Source:
    """`name`: the observation there, without LeRobot's prefix; here = there * scale + offset.

    `elements`: what a robot calls its elements here (`embodied deploy`); an environment knows them.
    """

    name: str
    scale: float = 1.0
    offset: float = 0.0
    elements: tuple[str, ...] = ()

    @property
    def same_units(self) -> bool:
        return self.scale == 1.0 and self.offset == 0.0


@dataclass(frozen=True)
class Mapping:
    """`obs`: for each name here, its source there; a name that is not listed is the same there.
    `action`: the values there that are -1 and +1 here, or how to measure them."""

    obs: abc.Mapping[str, Source] = field(default_factory=dict[str, Source])
    action: Affine | Range = "quantiles"

    @classmethod
    def load(cls, path: Path | str) -> Mapping:
        """Read a mapping file; ConfigError, in one line."""
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
        for key in settings:
            if key not in ("obs", "action"):
                raise ConfigError(
                    f'{where} has no setting "{key}"{nearest(str(key), ("obs", "action"))}'
                )
        obs = settings.get("obs") or {}
        if not isinstance(obs, abc.Mapping):
            raise ConfigError(f"{where}: obs should be NAME_HERE: NAME_THERE, not {shown(obs)}")
        names = cast(abc.Mapping[str, Any], obs)
        sources = {
            str(name): _source(given, f"{where}: obs.{name}") for name, given in names.items()
        }
        return cls(sources, _action(settings.get("action") or "quantiles", where))

    def to_json(self) -> dict[str, Any]:
        """The plain settings that `parse` reads."""
        action = self.action.to_json() if isinstance(self.action, Affine) else self.action
        obs: dict[str, dict[str, Any]] = {}
        for here, source in self.obs.items():
            obs[here] = {"name": source.name, "scale": source.scale, "offset": source.offset}
            if source.elements:
                obs[here]["elements"] = list(source.elements)
        return {"obs": obs, "action": action}

    def source(self, name: str) -> Source:
        """The source there of the observation `name` here."""
        return self.obs.get(name, Source(name))

    def obs_here(self, there: Tensors, names: abc.Iterable[str]) -> Tensors:
        """The observations `names` of here, from those of there."""
        found: Tensors = {}
        for name in names:
            source = self.source(name)
            value, same = there[source.name], source.same_units
            found[name] = value if same else value * source.scale + source.offset
        return found

    def obs_there(self, here: Tensors, names: abc.Iterable[str]) -> Tensors:
        """The observations of there that are made of `names` here; the inverse of `obs_here`."""
        found: Tensors = {}
        for name in names:
            source, value = self.source(name), here[name]
            same = source.same_units
            found[source.name] = value if same else (value - source.offset) / source.scale
        return found


def short(name: str) -> str:
    """An observation's name without LeRobot's prefix: `top` of `observation.images.top`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _source(given: Any, where: str) -> Source:
    if isinstance(given, str):
        return Source(short(given))
    known = ("name", "scale", "offset", "elements")
    if not isinstance(given, abc.Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(
            f"{where} should be a name there, or {{name: ..., scale: ..., offset: ...}}"
        )
    node = cast(abc.Mapping[str, Any], given)
    for key in node:
        if key not in known:
            raise ConfigError(f'{where} has no setting "{key}"{nearest(str(key), known)}')
    scale, offset = node.get("scale", 1.0), node.get("offset", 0.0)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in (scale, offset)):
        raise ConfigError(f"{where}: scale and offset should be numbers")
    if scale == 0:
        raise ConfigError(f"{where}: scale should not be 0")
    elements = node.get("elements") or []
    if not isinstance(elements, list) or not all(isinstance(e, str) for e in elements):
        raise ConfigError(f"{where}: elements should be a list of names")
    names = tuple(str(e) for e in cast(list[str], elements))
    return Source(short(node["name"]), float(scale), float(offset), names)


def _action(given: Any, where: str) -> Affine | Range:
    if isinstance(given, str) and given in RANGES:
        return cast(Range, given)
    node = cast(abc.Mapping[str, Any], given) if isinstance(given, abc.Mapping) else {}
    if set(node) != {"low", "high"}:
        raise ConfigError(
            f"{where}: action should be {{low: [...], high: [...]}} (the values there of -1 and +1 "
            f"here), quantiles or minmax, not {shown(given)}"
        )
    try:
        return Affine.from_json(node)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: action: {error}") from error


def require_names(here: Spec, mapping: Mapping) -> None:
    """ConfigError for a name of the mapping that is not an observation of `here`."""
    for name in mapping.obs:
        if name not in here.obs:
            raise ConfigError(
                f"mapping: obs.{name} is no observation here{nearest(name, here.obs)}"
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
    """ConfigError unless actions have the same size and rate, and the mapping's range fits them."""
    ours, theirs = here.act, there.act
    names = f" ({', '.join(theirs.names)})" if theirs.names else ""
    if ours.size != theirs.size or ours.dtype != theirs.dtype:
        raise ConfigError(
            f"the action is {said(ours)} here and {said(theirs)}{names} there: no mapping can join "
            "them"
        )
    if isinstance(mapping.action, Affine) and mapping.action.size != ours.size:
        raise ConfigError(
            f"mapping: action.low and action.high should have {ours.size} numbers{names}, not "
            f"{mapping.action.size}"
        )
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
    """A leaf's type and shape: `float32[6]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def listed(spec: Spec) -> str:
    """The observations of a spec with their types and shapes."""
    return ", ".join(f"{name} {said(leaf)}" for name, leaf in spec.obs.items())


Numbers = NDArray[np.float64]
NOISE = 1e-4  # a smaller range, relative to the values (1 or more), is that of measurement noise

Statistics = Literal["quantiles", "minmax", "mean_std"]
"""What is -1 and +1: the 1% and 99% quantiles; the extremes; mean -+ standard deviation."""


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
    return Affine.of_range(_listed(low), _listed(high))


def _varies(low: Numbers, high: Numbers) -> NDArray[np.bool_]:
    return high - low > NOISE * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))


def reach(values: Tensor, by: Affine) -> float:
    """The largest absolute value of `values` [N, *shape] normalised with `by`."""
    return float(by.to_unit(values.float()).abs().max())


def outside(values: Tensor) -> float:
    """The share of the elements of `values` that are beyond -1 or +1, by more than rounding."""
    return float((values.abs() > 1 + 1e-4).float().mean())


def _listed(values: Any) -> list[float]:
    return [float(value) for value in values]


MOST_OUTSIDE = 0.2
"""A larger share of actions beyond +-1 means that the range of the mapping is not the data's."""


def remapped(episodes: Episodes, here: Spec, mapping: Mapping, where: str) -> Episodes:
    """`episodes` with the observations of `here` and actions whose -1 and +1 are the mapping's.

    Nothing is clamped: actions beyond the mapping's range are beyond +-1. ConfigError, which begins
    with `where`, if something is missing, has another shape or another unit.
    """
    try:
        require_names(here, mapping)
        require_actions(here, episodes.spec, mapping)
        for name in here.obs:
            required_source(name, here, episodes.spec, mapping)
        steps = dict(episodes.steps)
        action = _unit_action(steps["action"], mapping, here)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    seen = mapping.obs_here(under(steps, "obs"), here.obs)
    rest = {k: v for k, v in steps.items() if not k.startswith("obs/")}
    seen, final = _shaped(seen, here), _shaped(mapping.obs_here(episodes.final, here.obs), here)
    steps = {**nest(seen, "obs"), **rest, "action": action}
    return replace(episodes, spec=replace(here, text=episodes.spec.text), steps=steps, final=final)


def _unit_action(values: Tensor, mapping: Mapping, here: Spec) -> Tensor:
    """Actions [N, *shape] in the units of here; ConfigError where most of them are beyond +-1."""
    by = mapping.action if isinstance(mapping.action, Affine) else measured(values, mapping.action)
    unit = by.to_unit(values.float()).reshape(len(values), *here.act.shape)
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
