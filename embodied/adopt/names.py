"""Names and units: which observation an input of the policy gets, and what its actions are here."""

from __future__ import annotations

import collections.abc as abc
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from embodied.adopt.lerobot_config import Feature, LeRobotConfig, Map, Stats
from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.spec import Bound, Leaf, Spec
from embodied.datasets.mapping import Mapping, Source, short

SLACK = 0.05  # values may lie that far outside of bounds, relative to their range


@dataclass(frozen=True)
class Names:
    """A mapping file as a policy needs it: `source` of every observation here (None: not given);
    one observation may be several inputs, `also`: {input: observation}."""

    mapping: Mapping = field(default_factory=Mapping)
    also: abc.Mapping[str, str] = field(default_factory=dict[str, str])
    units: bool = False  # the file says what the actions are

    @classmethod
    def load(cls, path: str | None) -> Names:
        """Read a mapping file (None: none); ConfigError."""
        if path is None:
            return cls()
        try:
            node = yaml.safe_load(Path(path).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return cls(Mapping.load(path))  # with its error
        if not isinstance(node, dict):
            return cls(Mapping.load(path))
        given = cast(dict[str, Any], node)
        obs = given.get("obs")
        also: dict[str, str] = {}
        if isinstance(obs, dict):
            firsts: dict[Any, Any] = {}
            for name, theirs in cast(dict[Any, Any], obs).items():
                several = isinstance(theirs, list) and theirs
                words = [short(str(each)) for each in cast(list[Any], theirs)] if several else []
                also |= {word: str(name) for word in words[1:]}
                firsts[name] = words[0] if words else theirs
            given = {**given, "obs": firsts}
        return cls(Mapping.parse(given, path), also, "action" in given)

    def here(self, wanted: str, spec: Spec) -> tuple[str, Source] | None:
        """Our observation for the input `wanted` (a short name), and how its values are related."""
        for name, source in self.mapping.obs.items():
            if source.name == wanted:
                return name, source
        if wanted in self.also:
            return self.also[wanted], Source(wanted)
        if wanted in spec.obs and wanted not in self.mapping.obs:
            return wanted, Source(wanted)
        return None


def observation_names(config: LeRobotConfig, names: Names, spec: Spec) -> dict[str, str]:
    """Our observation of every input; ConfigError for one that is missing."""
    found: dict[str, str] = {}
    for name, feature in config.inputs.items():
        match = names.here(short(name), spec)
        if match is None or match[0] not in spec.obs:
            kind = "picture" if feature.kind == "image" else f"vector of {feature.shape[0]}"
            missing = "" if match is None else f" ({match[0]}, which the mapping names, is absent)"
            raise ConfigError(
                f"the policy needs {name} (a {kind}), and the environment has no observation for "
                f"it{missing}; it has {', '.join(sorted(spec.obs))}: mapping=FILE with obs: "
                f"{{OURS: {name}}}"
            )
        found[name] = match[0]
    return found


def scaled_inputs(
    config: LeRobotConfig, maps: abc.Mapping[str, Map], names: Names, spec: Spec
) -> dict[str, Map]:
    """The maps of the inputs from our units: here = there * scale + offset."""
    made: dict[str, Map] = {}
    for name, each in maps.items():
        match = names.here(short(name), spec)
        source = match[1] if match else Source(short(name))
        if config.inputs[name].kind == "image" and not source.same_units:
            raise ConfigError(f"{name} is a picture: it has no scale and offset")
        low, scale = each.low * source.scale + source.offset, each.scale * source.scale
        made[name] = Map(low, scale, each.offset)
    return made


def require_units(
    config: LeRobotConfig, stats: abc.Mapping[str, Stats], names: Names, spec: Spec
) -> None:
    """ConfigError if an input's training data lie outside of the bounds of our observation."""
    for name in config.inputs:
        match, stat = names.here(short(name), spec), stats.get(name, {})
        leaf = spec.obs[match[0]] if match else None
        if leaf is None or leaf.is_image or "min" not in stat or "max" not in stat:
            continue
        assert match is not None
        source = match[1]
        ends = [stat[key] * source.scale + source.offset for key in ("min", "max")]
        low, high = ends[0].minimum(ends[1]).min().item(), ends[0].maximum(ends[1]).max().item()
        slack = SLACK * (high - low)
        least, most = min(_ends(leaf.low, -math.inf)), max(_ends(leaf.high, math.inf))
        if not (low >= least - slack and high <= most + slack):
            raise ConfigError(
                f"units do not match: {name} is in [{low:g}, {high:g}] in the policy's training "
                f"data, and {match[0]} in [{least:g}, {most:g}]: mapping=FILE with "
                f"obs: {{{match[0]}: {{name: {name}, scale: ..., offset: ...}}}}"
            )


def _ends(bound: Bound, otherwise: float) -> list[float]:
    values = bound if isinstance(bound, tuple) else (bound,)
    return [otherwise if value is None else value for value in values]


def action_units(names: Names, stats: Stats, size: int) -> Affine:
    """The physical values of our actions of -1 and +1; ConfigError if they are not known."""
    given = names.mapping.action
    if isinstance(given, Affine):
        if given.size != size:
            raise ConfigError(f"the mapping's action has {given.size} values, the policy {size}")
        return given
    if names.units:
        keys = ("q01", "q99") if given == "quantiles" else ("min", "max")
        if any(key not in stats for key in keys):
            raise ConfigError(
                f"the checkpoint's statistics of actions have no {' and '.join(keys)}: "
                "mapping=FILE with action: {low: [...], high: [...]}"
            )
        least, most = (stats[key].flatten().tolist() for key in keys)
        return Affine.of_range(least, most)
    low, high = stats.get("min"), stats.get("max")
    if low is None or high is None or low.min() < -1 - SLACK or high.max() > 1 + SLACK:
        seen = "are not known"
        if low is not None and high is not None:
            seen = f"are in [{float(low.min()):g}, {float(high.max()):g}]"
        raise ConfigError(
            f"units do not match: the policy's actions {seen}, the environment's are in [-1, 1]: "
            "mapping=FILE with action: {low: [...], high: [...]}, its values of -1 and +1"
        )
    return Affine((-1.0,) * size, (1.0,) * size)


def own_spec(config: LeRobotConfig, stats: abc.Mapping[str, Stats], fps: float, text: str) -> Spec:
    """The Spec of the checkpoint itself: short names, physical units, the range of its actions."""
    obs = {short(name): _leaf(each) for name, each in config.inputs.items()}
    if len(obs) < len(config.inputs):
        raise ConfigError(f"two inputs have the same name without prefix: {list(config.inputs)}")
    action = stats.get("action", {})
    low, high = (
        tuple(action[key].flatten().tolist()) if key in action else None for key in ("min", "max")
    )
    return Spec(obs, Leaf((config.action,), low=low, high=high), 1 / fps, text=text)


def _leaf(feature: Feature) -> Leaf:
    if feature.kind == "image":
        channels, height, width = feature.shape
        return Leaf((height, width, channels), dtype="uint8")
    return Leaf(feature.shape)
