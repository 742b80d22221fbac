"""Every setting of every class says what it is and which numbers it takes; no YAML repeats one."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
import yaml

from embodied.compose import DATA, PACKAGED, PRIMARY, compose
from embodied.core.bounds import Bound
from embodied.core.build import ConfigError, Node, plain, resolve
from embodied.core.config_fields import (
    Setting,
    Source,
    complete,
    config_of,
    fields_of,
    require_settings,
    settings_of,
    source_of,
    with_defaults,
)
from embodied.learners.learner import Learner
from tests.test_import_direction import PRODUCT, module_of, sources


@dataclass(frozen=True)
class Field:
    """A setting and the dataclass that has it."""

    owner: str
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.setting.source.module}.{self.owner}.{self.setting.name}"


def targets() -> set[str]:
    """Classes that settings configure: those with `config` in `__init__`, those that a YAML names,
    and those of commands."""
    found = {*PRIMARY.values(), *DATA.values(), *named()}
    for path in sources(*PRODUCT):
        found |= {f"{module_of(path)}.{name}" for name in configured(path)}
    return found


def named() -> set[str]:
    nodes = map(loaded, PACKAGED.rglob("*.yaml"))
    return {str(each["_target_"]) for node in nodes for each in nodes_in(node)}


def parsed() -> Iterator[tuple[Source, ast.ClassDef]]:
    for path in sources(*PRODUCT):
        text = path.read_text()
        source = source_of(module_of(path)) if "core.build" in text else None
        names = re.findall(r"\bparse\(([A-Z]\w+|\w+\.[A-Z]\w+), ", text)
        yield from filter(None, (source.find(name) for name in names if source is not None))


def configured(path: Path) -> Iterator[str]:
    """The classes of a file whose `__init__` takes `config`."""
    tree = ast.parse(path.read_text())
    for kind in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        made = [part for part in kind.body if getattr(part, "name", "") == "__init__"]
        if any(getattr(arg, "arg", "") == "config" for init in made for arg in ast.walk(init)):
            yield kind.name


@cache
def loaded(file: Path) -> Any:
    """What a YAML file holds; nobody changes it. libyaml's reader takes a tenth of the time."""
    return yaml.load(file.read_text(), yaml.CSafeLoader)


def nodes_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from nodes_in(each)


@cache
def every_field() -> dict[str, Field]:
    """Every setting of every configured class, those of dataclasses inside of it too."""
    found: dict[str, Field] = {}
    for target in targets():
        if (config := config_of(target)) is not None:
            for setting in settings_of(target) or []:
                add(found, config[1].name, setting)
    for source, tree in parsed():
        for setting in settings_of(f"{source.module}.{tree.name}") or []:
            add(found, tree.name, setting)
    return found


def add(found: dict[str, Field], owner: str, setting: Setting) -> None:
    field = Field(owner, setting)
    if field.name in found:
        return
    found[field.name] = field
    for kind in inner(setting.kind):
        for each in fields_of(kind):
            add(found, kind.__name__, each)


def inner(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    for each in typing.get_args(kind):
        yield from inner(each)


def bare(kind: Any) -> bool:
    """Whether a type has a number without a bound."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return bare(args[0]) and not any(isinstance(each, Bound) for each in args[1:])
    if origin is typing.Literal:
        return False
    if origin is dict and args:
        return bare(args[1])
    return kind in (int, float) or any(bare(each) for each in args)


def test_every_setting_says_what_it_is_and_every_number_has_a_bound() -> None:
    every = every_field()
    assert len(every) > 1400
    assert "embodied.learners.actor_critic.OffPolicyConfig.tau" in every
    assert sorted(name for name, field in every.items() if not field.setting.says) == []
    assert sorted(name for name, field in every.items() if bare(field.setting.kind)) == []


def test_defaults_are_read_as_they_are() -> None:
    """What `compose` writes to run.yaml is what the class would use."""
    compared = 0
    for target in sorted(named()):
        known = settings_of(target)
        try:
            cls = resolve(target, object)
        except (ConfigError, ImportError):  # an optional package is missing
            continue
        config = cls if is_dataclass(cls) else typing.get_type_hints(cls.__init__).get("config")
        if config is None:  # a class with keywords
            continue
        defaults = dict(defaults_of(config))
        assert known is None or [setting.name for setting in known] == list(defaults), target
        for setting in known or []:
            try:
                value = setting.value()
            except LookupError:
                continue
            assert defaults[setting.name] == value, f"{target}.{setting.name}"
            compared += 1
    assert compared > 900 and settings_of("no.such.Class") is None


def defaults_of(config: Any) -> Iterator[tuple[str, Any]]:
    """The defaults of a dataclass as plain values."""
    for field in fields(config):
        made = None if field.default_factory is MISSING else field.default_factory()
        value = made if field.default is MISSING else field.default
        yield field.name, plain(asdict(cast(Any, value)) if is_dataclass(value) else value)


@pytest.mark.parametrize("experiment", ["pendulum_sac", "fr3_lift_dsrl", "minigrid_doorkey_ppo"])
def test_run_yaml_holds_every_setting(experiment: str) -> None:
    """Of every part, at every depth."""
    node = compose("train", [f"experiment={experiment}"]).node
    assert set(node) >= {each.name for each in settings_of(PRIMARY["train"]) or []}
    for part in ("env", "policy", "learner", "finetune", "teacher", "reward"):
        for each in nodes_in(node[part]):
            for setting in settings_of(str(each["_target_"])) or []:
                known = setting.default is None or setting.name in each
                assert known, f"{each['_target_']}.{setting.name}"
    assert node["data"].keys() >= {s.name for s in settings_of(DATA[node["data"]["regime"]]) or []}


def test_nonsense_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as refused:
        compose("train", ["experiment=pendulum_sac", "learner.tau=5"])
    assert str(refused.value) == "learner.tau=5 should be above 0, at most 1"
    assert isinstance(refused.value.allowed, Bound) and refused.value.key is not None


def without_gaps(node: dict[str, Any]) -> dict[str, Any]:
    """`node` without the values, and the blocks of values, that its user has to complete."""
    return {
        key: without_gaps(value) if isinstance(value, dict) else value
        for key, value in node.items()
        if value != "???" and not (isinstance(value, dict) and "???" in value.values())
    }


OPTIONS = sorted(PACKAGED.glob("*/*.yaml"))
WITH_CLASS = [file for file in OPTIONS if "_target_" in (loaded(file) or {})]


@pytest.mark.parametrize("file", WITH_CLASS, ids=lambda file: file.stem)
def test_the_values_of_every_option_are_within_bounds(file: Path) -> None:
    node = without_gaps(loaded(file))
    given = {key: value for key, value in node.items() if key != "defaults"}
    require_settings(file.parent.name, given)


def options_of(file: Path) -> list[Any]:
    return (loaded(file) or {}).get("defaults") or []


def own(file: Path) -> Node:
    """What the file itself sets."""
    return {key: value for key, value in (loaded(file) or {}).items() if key != "defaults"}


def others(file: Path) -> list[Path]:
    names = [each for each in options_of(file) if isinstance(each, str) and each != "_self_"]
    return [file.with_name(f"{name}.yaml") for name in names]


def whole(file: Path) -> Node:
    """What the file and those that it goes on from set."""
    return merged(reduce(merged, map(whole, others(file)), {}), own(file))


def merged(below: Any, above: Any) -> Any:
    """Hydra's merge: mappings by key, everything else replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    both = {key: merged(below[key], above[key]) for key in below.keys() & above.keys()}
    return {**below, **above, **both}


def chosen(experiment: Path) -> dict[str, str | None]:
    """The option of every group, of those inside of another part too."""
    made: dict[str, str | None] = {}
    for entry in options_of(experiment):
        if isinstance(entry, dict):
            made |= {str(k).removeprefix("override ").lstrip("/"): v for k, v in entry.items()}
        elif entry != "_self_":
            made |= chosen(experiment.with_name(f"{entry}.yaml"))
    return made


def base_of_run(experiment: Path) -> Node:
    """The settings that an experiment changes: those of train.yaml, of the options that it chooses
    and of other experiments, with all defaults."""
    node = own(PACKAGED / "train.yaml")
    del node["steps"]  # it has no default of the class: an experiment says how long it is
    for group, name in chosen(experiment).items():
        if "@" not in group and group not in ("size", "data"):
            node[group] = None if name is None else whole(PACKAGED / group / f"{name}.yaml")
    node = reduce(merged, map(whole, others(experiment)), node)
    final = merged(node, own(experiment))
    data = node.pop("data", None) or {}
    regime = (final.get("data") or {}).get("regime", "auto")
    if regime == "auto":
        regime = str(resolve(final["learner"]["_target_"], Learner).data)
    told = merged(own(PACKAGED / "data" / f"{regime}.yaml"), data)
    made = with_defaults(settings_of(PRIMARY["train"]) or [], node)
    return made | {"data": with_defaults(settings_of(DATA[regime]) or [], told)}


def base_of(file: Path) -> Node:
    """The settings, with all defaults, that a YAML file changes."""
    if file.parent == PACKAGED:
        return with_defaults(settings_of(PRIMARY[file.stem]) or [], {})
    if file.parent.name == "experiment":
        return base_of_run(file)
    if file.parent.name == "data":
        return with_defaults(settings_of(DATA.get(str(own(file).get("regime")), "")) or [], {})
    return reduce(merged, map(whole, others(file)), {})


def repeated(node: Any, base: Any, above: str = "") -> Iterator[str]:
    """The keys of `node` whose values `base` has as well."""
    if isinstance(node, dict) and "_target_" in node:
        below = base if isinstance(base, dict) else {}
        base = complete({**below, "_target_": node["_target_"]})
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        known = isinstance(node, dict) and isinstance(base, dict) and key in base
        if isinstance(value, dict | list) and not (known and value == base[key]):
            yield from repeated(value, base[key] if known else None, f"{above}{key}.")
        elif known and key != "_target_" and value == base[key]:
            yield f"{above}{key}"


# In a size a default is a change of an experiment's value.
SIZES = {*PACKAGED.glob("size/*.yaml")}
TOPS = [PACKAGED / f"{name}.yaml" for name in PRIMARY if name != "run"]


@pytest.mark.parametrize(
    "file", sorted({*OPTIONS, *TOPS} - SIZES), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_a_yaml_says_what_differs(file: Path) -> None:
    again = list(repeated(own(file), base_of(file)))
    assert again == [], "these values are the class's defaults: leave them out"
