"""Compose: merges YAML groups and command-line overrides into one plain dictionary, with Hydra.

No other module imports Hydra. Groups are folders of YAML files: the packaged `configs/` first, then
every `--config-dir` and every folder in the environment variable EMBODIED_CONFIGS.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from embodied.core.build import (
    ConfigError,
    Node,
    allow,
    closest,
    kind_of,
    nearest,
    typed,
    unknown,
)
from embodied.core.children import import_from_here
from embodied.core.config_fields import (
    Setting,
    complete,
    require_settings,
    settings_of,
    with_defaults,
)
from embodied.core.saved_node import parse_yaml, require_inside

PACKAGED = Path(str(files("embodied.configs")))
RUN = "embodied.training.config.RunConfig"
PRIMARY = {
    "train": RUN,
    "run": RUN,
    "diagnose": "embodied.improvement.diagnosis.Config",
    "improve": "embodied.improvement.improve.ImproveConfig",
}
"""The class of a command's settings, where it has one; `run` is a run.yaml that is resumed."""
DATA = {
    "offline": "embodied.training.config.Offline",
    "off_policy": "embodied.training.config.OffPolicy",
    "on_policy": "embodied.training.config.OnPolicy",
}
"""The class of `data` in each training regime."""


@dataclass(frozen=True)
class Composition:
    """`node`: plain nested dicts; `choices`: the chosen option of every group."""

    node: Node
    choices: Mapping[str, str | None]


@cache
def other_words() -> dict[str, dict[str, Any]]:
    """What other libraries' words are here."""
    return yaml.safe_load(Path(__file__).with_name("other_words.yaml").read_text())


def ours(kind: str, word: str) -> str:
    """Which of our "settings", Python "keywords" or "names" other libraries' `word` is, or ""."""
    return next((here for here, theirs in other_words()[kind].items() if word in theirs), "")


def search_folders(given: Sequence[Path | str] = ()) -> list[Path]:
    """The packaged folder, then `given`, then those in EMBODIED_CONFIGS.

    Raises ConfigError if a folder does not exist, or has an option of a name that another one has.
    """
    named = [*map(str, given), *filter(None, os.environ.get("EMBODIED_CONFIGS", "").split(":"))]
    folders = [PACKAGED]
    for folder in map(Path, named):
        if not folder.is_dir():
            raise ConfigError(f"the configuration folder {folder} does not exist")
        if any(folder.samefile(known) for known in folders):
            continue
        for file in sorted(folder.glob("*/*.yaml")):
            name = file.relative_to(folder)
            hidden = next((known for known in folders if (known / name).exists()), None)
            if hidden is not None:
                raise ConfigError(f"{file} has the same name as {hidden / name}; rename it")
        folders.append(folder.resolve())
    return folders


def options(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    found = {file.stem: file for folder in folders for file in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def groups_of(folders: Sequence[Path]) -> list[str]:
    """The names of all groups that have options."""
    found = {file.parent.name for folder in folders for file in folder.glob("*/*.yaml")}
    return sorted(found)


def is_gymnasium_id(name: str) -> bool:
    """Whether an environment of this name is Gymnasium's, or registered with it by a package."""
    return ":" in name or GYMNASIUM_ID.fullmatch(name) is not None


def option(file: Path) -> Node:
    """The settings in an option's YAML file, with the defaults of its class."""
    return complete(_load(file))


def compose(
    primary: str,
    overrides: Sequence[str],
    folders: Sequence[Path | str] = (),
    given: Mapping[str, Node] | None = None,
) -> Composition:
    """`configs/PRIMARY.yaml` with its groups and `overrides` ("learner=NAME", "learner.lr=1e-4").

    `given`: options that are not files of ours ("env/as_trained": node, read from a run); they may
    not name what reaches beyond this process, unless the command line allows it. `allow=[package]`
    permits `_target_` classes of the user's own packages, also from the current folder; only
    `overrides` may say it. Every user error raises a ConfigError of one line.
    """
    search, given = search_folders(folders), given or {}
    for name, saved in given.items():
        if found := {"defaults", "hydra"} & saved.keys():
            raise ConfigError(f"{name}: {min(found)} has no place in a saved run")
    for file in (file for folder in search[1:] for file in sorted(folder.glob("*/*.yaml"))):
        parse_yaml(file.read_text(), str(file))  # ConfigError that names file and line
    with _written(given) as extra:
        found = [PACKAGED, *extra, *search[1:]]
        top = _load(next(f for f in (d / f"{primary}.yaml" for d in found) if f.exists()))
        top = _completed(primary, top) if primary in PRIMARY else top
        asked = _prepared(top, overrides, found)
        if strays := [each for each in asked if each.stray]:
            raise _stray(primary, strays[0], [each for each in asked if not each.stray], top, found)
        node, choices = _composed(primary, asked, found)
    for dropped in (each.key for each in asked if each.text.startswith("~")):
        if not any(each.key.startswith(f"{dropped}.") for each in asked):
            node[dropped] = None  # drops what an experiment sets in it
    import_from_here()
    packages = node.pop("allow", None) or []
    if packages and not any(text.startswith("allow") for text in overrides):
        names = ",".join(map(str, packages))
        raise ConfigError(f'a file sets allow; only the command line may: "allow=[{names}]"')
    for package in packages:
        allow(str(package))
    for name, saved in given.items():
        group, _, option = name.partition("/")
        if not option or choices.get(group) == option:
            require_inside(saved, f"the saved {group}")
    _require_types(primary, top, node)
    for name, value in node.items():
        group = name != "data" and any((folder / name).is_dir() for folder in search)
        if isinstance(value, dict) and group:
            require_settings(name, value)
    for name in ("data", "regimes"):
        typed(dict, node.get(name) or {}, name)
    if "regimes" in node:
        _fill_data(node, node.pop("regimes"), {each.key for each in asked}, search)
    data = node.get("data") or {}
    for setting in _data_settings(data.get("regime")):
        if setting.name in data:
            typed(setting.kind, data[setting.name], f"data.{setting.name}")
    node = _completed(primary, node)
    _bound(node, node.pop("at_most", {}))
    return Composition(node, choices)


def allow_from(words: Sequence[str]) -> None:
    """Allow the packages of the words `allow=[...]`, where nothing else is composed."""
    import_from_here()
    for word in words:
        named = yaml.safe_load(word.partition("=")[2]) if word.startswith("allow=") else []
        for package in [named] if isinstance(named, str) else named:
            allow(str(package))


def _require_types(primary: str, top: Node, node: Node) -> None:
    if primary in PRIMARY:
        for setting in settings_of(PRIMARY[primary]) or []:
            if setting.name != "data" and node.get(setting.name) is not None:
                typed(setting.kind, node[setting.name], setting.name)
        return
    for name, value in node.items():
        if isinstance(value, str) and type(top.get(name)) in (int, float):
            typed(type(top[name]), value, name)


def _completed(primary: str, node: Node) -> Node:
    """`node` with every default of every part, as far as the source of its class tells them."""
    if primary not in PRIMARY:
        return complete(node)
    made = with_defaults(settings_of(PRIMARY[primary]) or [], node)
    if isinstance(data := node.get("data"), Mapping):
        regime = data.get("regime")
        made["data"] = {"regime": regime, **with_defaults(_data_settings(regime), data)}
    return made


def _data_settings(regime: object) -> Sequence[Setting]:
    """The settings of `data` in a training regime."""
    return settings_of(DATA.get(str(regime), "")) or []


def _fill_data(
    node: Node, regimes: Mapping[str, Node], given: set[str], search: Sequence[Path]
) -> None:
    """Complete `node["data"]` with the defaults of its regime, and with `regimes` of the size.

    Settings on the command line (`given`) take precedence. If it sets the regime itself
    (`data=offline`), an experiment's settings of other regimes are dropped.
    """
    data = node.get("data") or {}
    regime = data.get("regime", "auto")
    if regime == "auto":
        from embodied.learners.learner import Learner

        regime = str(kind_of(node["learner"], Learner).data)
    file = options("data", search).get(regime)
    defaults = _load(file) if file else {}
    if "data" in given:
        known = {setting.name for setting in _data_settings(regime)}
        data = {k: v for k, v in data.items() if k in known or f"data.{k}" in given}
    sized = regimes.get(regime, {}).items()
    sized = {key: value for key, value in sized if f"data.{key}" not in given}
    node["data"] = {**defaults, **data, **sized, "regime": regime}


def _bound(node: Node, most: Mapping[str, Any]) -> None:
    """Lower the settings of `node` to the bounds in `most`."""
    for key, bound in most.items():
        if isinstance(bound, Mapping):
            _bound(node.get(key) or {}, cast(Mapping[str, Any], bound))
        elif key in node:
            node[key] = min(node[key], bound)


@contextmanager
def _written(given: Mapping[str, Node]) -> Iterator[list[Path]]:
    if not given:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, node in given.items():
            file = Path(folder) / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(node, sort_keys=False))
        yield [Path(folder)]


@dataclass(frozen=True)
class Override:
    """One word of a command line: `text` is the word as Hydra reads it where an option of a group
    is `chosen`; else the setting `key` becomes `value`. `stray`: no setting has that name."""

    key: str
    value: Any
    text: str
    chosen: bool = False
    stray: str = ""


KEY = re.compile(r"[\w.@/-]+")
WHOLE = re.compile(r"[-+]?\d+(_\d+)*")
WORDS = {"null": None, "true": True, "false": False}
GYMNASIUM_ID = re.compile(r"[\w:./-]+-v\d+")


def read_override(text: str) -> Override:
    """One word `key=value`. Only a value that begins with [ or { is read as a list or a mapping; a
    number, true, false and null are those, and everything else is text, as it is."""
    key, equals, written = text.partition("=")
    if not equals or not KEY.fullmatch(key):
        raise ConfigError(f'cannot read "{text}": expected key=value')
    return Override(key, _value(written, text), text)


def _value(written: str, text: str) -> Any:
    if written.startswith(("[", "{")):
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            return OverridesParser.create().parse_overrides([f"value={written}"])[0].value()
        except HydraException as error:
            raise ConfigError(
                f'cannot read "{text}": a list is written [1,2], a mapping {{name: 1}}'
            ) from error
    if written.lower() in WORDS:
        return WORDS[written.lower()]
    if WHOLE.fullmatch(written):
        return int(written)
    try:
        return float(written) if written.strip() == written else written
    except ValueError:
        return _unquoted(written).replace("${", "\\${")


def _unquoted(written: str) -> str:
    if len(written) > 1 and written[0] == written[-1] == '"':
        try:
            return str(json.loads(written))
        except ValueError:
            return written
    return written[1:-1] if len(written) > 1 and written[0] == written[-1] == "'" else written


def _prepared(top: Node, overrides: Sequence[str], search: Sequence[Path]) -> list[Override]:
    """The words as overrides; ConfigError for an unknown option, with the nearest name.

    Settings that a node's YAML file does not list are added: `require_settings` knows the fields of
    its dataclass.
    """
    groups = _groups(top)
    asked: list[Override] = []
    for text in overrides:
        each = read_override(text)
        key, value = each.key, each.value
        group = key in groups or ("@" in key and isinstance(value, str))  # robot@env.robot=NAME
        _require_one_value(each, group)
        if group and value is None:
            asked.append(Override(key, None, f"~{key}", chosen=True))  # no option of the group
        elif group and isinstance(value, str):
            asked += _chosen(each, options(key.partition("@")[0], search))
        elif key in top and any((d / key).is_dir() for d in search) and isinstance(value, str):
            raise ConfigError(
                f"{key} cannot be chosen here ({text}); set its values: {key}.KEY=..."
            )
        else:
            known = group or key.split(".")[0] in groups
            asked.append(replace(each, stray="" if known else _unknown_part(key, top, groups)))
    return asked


def _groups(top: Node) -> set[str]:
    """The groups of which a command chooses options."""
    return {next(iter(entry)) for entry in top.get("defaults", []) if isinstance(entry, dict)}


def _chosen(each: Override, known: Mapping[str, Path]) -> list[Override]:
    """The choice of an option; ConfigError where it is none of `known`. A Gymnasium id is an
    environment as well."""
    key, name = each.key, each.value
    if name in known:
        return [replace(each, chosen=True)]
    if key == "env" and is_gymnasium_id(name):
        return [Override("env", "gym", "env=gym", chosen=True), Override("env.id", name, each.text)]
    raise unknown(f'there is no {key} "{name}"', name, known, key=key)


def _require_one_value(each: Override, group: bool) -> None:
    """ConfigError for several values, as Hydra sweeps over them: a text may hold commas."""
    if not isinstance(each.value, str) or "," not in each.value:
        return
    values = each.value.split(",")
    if group or not any(isinstance(_value(value, ""), str) for value in values):
        line = f"a run has one {each.key}, and {each.value} are several: embodied study FILE runs"
        line += " variants and seeds, embodied sweep tries values; a list is written"
        raise ConfigError(f"{line} {each.key}=[{each.value}]")


def _unknown_part(key: str, top: Node, groups: set[str]) -> str:
    """The part of a dotted `key` that is not in the primary configuration; empty: all are."""
    here: Any = top
    for depth, name in enumerate(key.split(".")):
        if here is None or (isinstance(here, dict) and "_target_" in here):
            return ""  # null: an option may be chosen for it (env@eval.env=NAME)
        known = {*here, *(groups if depth == 0 else ())} if isinstance(here, dict) else set()
        if name not in known - {"defaults"}:
            return name
        here = here.get(name)
    return ""


def _stray(
    primary: str, stray: Override, others: Sequence[Override], top: Node, search: Sequence[Path]
) -> ConfigError:
    """The error for a setting that is none of the command: it may be one of the chosen parts."""
    key, name = stray.key, stray.stray
    try:
        node = _composed(primary, others, search)[0]
    except ConfigError:
        node = top
    parts = {part: value for part, value in node.items() if isinstance(value, Mapping)}
    meant = ours("settings", key) or key
    places = [
        (setting, f"{part}.{setting}")
        for part, value in parts.items()
        for setting in {*value, *_names(part, value)}
    ]
    known = {*top, *_groups(top)}
    found = {meant} if meant != key and ("." in meant or meant in known) else set[str]()
    found = found or {place for setting, place in places if setting == meant}
    found = found or {place for setting, place in places if setting.endswith(f"_{meant}")}
    sure = bool(found)
    if not found and "." not in key:
        near = closest(key, {*known, *(setting for setting, _ in places)})
        found = set() if near in known else {place for setting, place in places if setting == near}
    if found:
        written = stray.text.partition("=")[2]
        typed = " or ".join(f"{place}={written}" for place in sorted(found))
        hint = f"you mean {typed}" if sure else f"did you mean {typed}?"
        return ConfigError(f'there is no setting "{key}"; {hint}', key=key)
    before = key.split(".")[: key.split(".").index(name)]
    here: Any = top
    for part in before:
        here = here.get(part)
    known = known if not before else {*here} if isinstance(here, Mapping) else set[str]()
    inside = f" in {'.'.join(before)}" if before else ""
    line = f'there is no setting "{name}"{inside}'
    return unknown(line, name, known - {"defaults"}, f"; you wrote {stray.text}")


def _names(part: str, node: Mapping[str, Any]) -> list[str]:
    classes = (
        DATA.values() if part == "data" else [str(node["_target_"])] if "_target_" in node else []
    )
    return [setting.name for each in classes for setting in settings_of(each) or []]


def _composed(
    primary: str, asked: Sequence[Override], search: Sequence[Path]
) -> tuple[Node, dict[str, str | None]]:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    # Hydra takes the primary configuration from the first folder only.
    first = next(folder for folder in search if (folder / f"{primary}.yaml").exists())
    paths = ",".join(f"'file://{folder}'" for folder in search if folder != first)
    try:
        with hydra.initialize_config_dir(str(first), version_base=None):
            config = hydra.compose(
                primary,
                [f"hydra.searchpath=[{paths}]", *(each.text for each in asked if each.chosen)],
                return_hydra_config=True,
            )
        choices = {str(k): v for k, v in config.hydra.runtime.choices.items()}
        with open_dict(config):
            config.pop("hydra")
        for each in asked:
            if not each.chosen:
                if isinstance(each.value, list) and OmegaConf.is_dict(config.get(each.key)):
                    typed(dict, each.value, each.key)
                OmegaConf.update(config, each.key, each.value, merge=True, force_add=True)
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{missing[0]} is not given: {missing[0]}=...")
        node: Any = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_one_line(error, search)) from error
    return node, choices


def _one_line(error: Exception, search: Sequence[Path]) -> str:
    text = str(error)
    if found := re.match(r"You must specify '(\w+)'", text):
        group = found[1]
        return f"{group} is not given: {group}=NAME{nearest('', options(group, search))}"
    missing = getattr(error, "missing_cfg_file", None)
    if missing and "/" in missing:
        group, name = missing.split("/", 1)
        return f'there is no {group} "{name}"{nearest(name, options(group, search))}'
    if isinstance(error, yaml.YAMLError):
        return " ".join(text.split())
    return text.splitlines()[0]


def _load(file: Path) -> Node:
    return yaml.safe_load(file.read_text()) or {}
