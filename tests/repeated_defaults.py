"""Finds values of configs/**.yaml that say again what the class says by default."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from embodied.compose import DATA, PACKAGED, PRIMARY
from embodied.core.build import resolve
from embodied.core.complete_node import complete, with_defaults
from embodied.core.config_fields import settings_of
from embodied.learners.learner import Learner

Node = dict[str, Any]
Place = tuple[str | int, ...]
GROUP_OF_EXPERIMENTS = "experiment"
OVERRIDING = ("size",)
"""Groups whose values replace those of any experiment: a default there is a change."""


def files() -> list[Path]:
    """The YAML files whose values have a class."""
    options = [file for file in PACKAGED.glob("*/*.yaml") if file.parent.name not in OVERRIDING]
    return sorted([*options, *(PACKAGED / f"{name}.yaml" for name in PRIMARY if name != "run")])


def repeated(file: Path) -> list[Place]:
    """The keys of `file` without which the completed settings are the same; the outermost ones."""
    node = read(file)
    whole = completed(file, node)
    return [place for place in places(node) if completed(file, without(node, place)) == whole]


def outermost(found: list[Place]) -> list[Place]:
    """The places that are inside of no other one."""
    return [each for each in found if not any(each[:n] in found for n in range(1, len(each)))]


def read(file: Path) -> Node:
    node = yaml.safe_load(file.read_text()) or {}
    return numbers({key: value for key, value in node.items() if key != "defaults"})


def numbers(value: Any) -> Any:
    """`value` with 1e-3, which YAML 1.1 reads as a text, as a number."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if isinstance(value, str) and value[:1].isdigit() and "e" in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Every key below `value`, outer ones first."""
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items:
        if key != "_target_":
            yield (*above, key)
            yield from places(item, (*above, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*above, index))


def without(node: Node, place: Place) -> Node:
    made: Any = copy.deepcopy(node)
    here = made
    for key in place[:-1]:
        here = here[key]
    del here[place[-1]]
    return made


def completed(file: Path, node: Node) -> Any:
    """The settings that the file stands for, with all defaults."""
    group = file.parent.name
    if file.parent == PACKAGED:
        return with_defaults(settings_of(PRIMARY[file.stem]) or [], node)
    if group == GROUP_OF_EXPERIMENTS:
        return of_run(merged(base_of(file), node))
    if group == "data":
        return of_data(node)
    return complete(merged(base_of_option(file), node))


def of_data(node: Node) -> Any:
    kind = DATA.get(str(node.get("regime")))
    return node if kind is None else with_defaults(settings_of(kind) or [], node)


def of_run(node: Node) -> Any:
    """A whole run, its `data` completed with its regime's defaults."""
    data = node.get("data") or {}
    regime = data.get("regime", "auto")
    if regime == "auto":
        regime = str(resolve(node["learner"]["_target_"], Learner).data)
    own = {**read(PACKAGED / "data" / f"{regime}.yaml"), **data, "regime": regime}
    rest: Node = {key: value for key, value in node.items() if key != "data"}
    return with_defaults(settings_of(PRIMARY["train"]) or [], rest) | {"data": of_data(own)}


def defaults(file: Path) -> list[Any]:
    return (yaml.safe_load(file.read_text()) or {}).get("defaults") or []


def base_of(experiment: Path) -> Node:
    """What an experiment changes: train.yaml, the options that it chooses, other experiments."""
    node = read(PACKAGED / "train.yaml")
    del node["steps"]  # it has no default of the class: an experiment says how long it is
    for group, name in chosen(experiment).items():
        option = PACKAGED / group / f"{name}.yaml"
        node[group] = (
            merged(base_of_option(option), read(option))
            if name is not None and group not in ("size", "data")
            else None
        )
    return reduce(merged, map(own_of, others(experiment)), node)


def base_of_option(option: Path) -> Node:
    """The options that it goes on from."""
    return reduce(merged, map(read, others(option)), {})


def own_of(experiment: Path) -> Node:
    return merged(reduce(merged, map(own_of, others(experiment)), {}), read(experiment))


def others(file: Path) -> list[Path]:
    names = [each for each in defaults(file) if isinstance(each, str) and each != "_self_"]
    return [file.with_name(f"{name}.yaml") for name in names]


def chosen(experiment: Path) -> dict[str, str | None]:
    """The option of every group."""
    made: dict[str, str | None] = {}
    for other in others(experiment):
        made |= chosen(other)
    for entry in [each for each in defaults(experiment) if isinstance(each, dict)]:
        for key, name in entry.items():
            made[str(key).removeprefix("override ").lstrip("/")] = name
    return made


def merged(below: Any, above: Any) -> Any:
    """Hydra's merge: mappings by key, everything else replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return copy.deepcopy(above)
    made = dict(copy.deepcopy(below))
    for key, value in above.items():
        made[key] = merged(made[key], value) if key in made else copy.deepcopy(value)
    return made
