"""Subcommands of the command line: a table of their words, options and help texts, and their code.

`table.yaml` names the function that runs each (NAME.run unless it says another). What the function
gets: `args.words`, `key=value` overrides; `args.names`, the words before them that name runs,
datasets or the like; `args.own`, settings of the command itself.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from embodied.core.build import ConfigError, Node, nearest

TYPES = {"path": Path, "int": int, "float": float}
COUNTS = {"any": (0, 1000), "one": (1, 1), "two": (2, 2), "some": (1, 1000), "several": (2, 1000)}
PLACES = {"dataset": "DIR ", "run": "RUN "}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors of one line.

    The settings of the command `settings` are the end of the help.
    """

    settings: str | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"'([^']*)'", found[2])
            raise ConfigError(f"there is no {self.prog} {found[1]}{nearest(found[1], known)}")
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def format_help(self) -> str:
        text = super().format_help()
        if self.settings is None:
            return text
        from embodied.settings_tables import command_text

        return f"{text}{command_text(self.settings)}\n"


@cache
def table() -> dict[str, Any]:
    """The entries of all subcommands, by name."""
    return yaml.safe_load(Path(__file__).with_name("table.yaml").read_text())


def add_all(
    subparsers: Any, entries: Mapping[str, Any], usual: Node, only: str | None = None
) -> None:
    """Add a parser for each of `entries`; its arguments, too, but of the one named `only`."""
    for name, entry in entries.items():
        parser = subparsers.add_parser(
            name,
            help=entry["help"],
            description=entry["help"],
            epilog=entry.get("epilog"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            _add_arguments(parser, {"run": f"{name}.run", **usual, **entry})


def _add_arguments(parser: Parser, entry: Node) -> None:
    options = dict(entry.get("arguments", {}))
    for name in [name for name in options if not name.startswith("-")]:
        parser.add_argument(name, **_typed(options.pop(name)))
    takes = entry.get("takes")
    if text := entry.get("overrides") or entry.get("words"):
        place = PLACES.get(takes[1], "") if takes and "words" in entry else ""
        parser.add_argument("words", nargs="*", metavar=f"{place}key=value", help=text)
    if "overrides" in entry:
        parser.add_argument(
            "--config-dir",
            action="append",
            default=[],
            metavar="DIR",
            help="a folder with your own YAML groups (may be repeated; or set EMBODIED_CONFIGS)",
        )
    for name, settings in options.items():
        parser.add_argument(name, **_typed(settings))
    parser.set_defaults(run=entry["run"], entry=entry)
    parser.settings = entry.get("settings")
    if kinds := entry.get("kinds"):
        metavar = entry.get("metavar", "|".join(kinds))
        subparsers = parser.add_subparsers(dest="kind", metavar=metavar, required=True)
        add_all(subparsers, kinds, {key: entry[key] for key in ("run", "takes") if key in entry})


def _typed(settings: Node) -> Node:
    return {**settings, "type": TYPES[settings["type"]]} if "type" in settings else settings


def function(name: str) -> Callable[..., Any]:
    """The function of this package with the dotted `name`; imports its module."""
    module, _, own = f"{__name__}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), own)


def checked(args: argparse.Namespace) -> Callable[[argparse.Namespace], None]:
    """What runs a command with `args`, whose words are put apart. ConfigError for words that the
    table does not allow, and for a run or a dataset that is not there, before the command's module
    is imported."""
    entry = args.entry
    kind = getattr(args, "kind", "")
    if "needs" in entry and not Path(args.path).is_dir():
        raise ConfigError(f"{args.path} is not a folder; give {entry['needs']}")
    if takes := entry.get("takes"):
        _take_names(args, *takes)
    if "own" in entry:
        args.own, args.words = named(args.words, entry["own"])
        unknown = [word for word in args.words if not word.startswith("allow=")]
        if unknown and not entry.get("more"):
            key, equals, _ = unknown[0].partition("=")
            says = f'there is no setting "{key}"' if equals else f'"{key}" is not understood'
            raise ConfigError(f"{says}{nearest(key, entry['own'])}")
        for key, says in entry["own"].items():
            if says and args.own[key] is None:
                raise ConfigError(says.replace("KEY", key))
    return function(args.run.replace("KIND", kind))


def _take_names(args: argparse.Namespace, count: str, what: str, says: str = "") -> None:
    args.names = [word for word in args.words if "=" not in word or Path(word).exists()]
    args.words = [word for word in args.words if word not in args.names]
    if what == "run":
        from embodied.policies.remote.address import is_address

        require_folders(run for run in args.names if not is_address(run))
    if what == "dataset":
        require_datasets(args.names)
    least, most = COUNTS[count]
    if not least <= len(args.names) <= most:
        raise ConfigError(says.replace("KIND", getattr(args, "kind", "")))


def named(words: Sequence[str], keys: Iterable[str]) -> tuple[dict[str, str | None], list[str]]:
    """The value of the last `key=value` among `words` of each of `keys` (None: not given), and the
    other words."""
    pairs = {word: word.partition("=") for word in words}
    found: dict[str, str | None] = dict.fromkeys(keys)
    own = [word for word, (key, equals, _) in pairs.items() if equals and key in found]
    found |= {pairs[word][0]: pairs[word][2] for word in own}
    return found, [word for word in words if word not in own]


def take(words: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of `key`, and the other words, as `named` has them."""
    found, rest = named(words, [key])
    return found[key], rest


def is_given(words: Iterable[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)


def is_true(own: Mapping[str, str | None], key: str) -> bool:
    """Whether KEY=true is said; ConfigError for what is neither true nor false."""
    said = own[key] or "false"
    if said not in ("true", "false"):
        raise ConfigError(f"{key}={said} should be true or false")
    return said == "true"


def require_one(words: Iterable[str], key: str) -> None:
    """ConfigError where `words` give `key` two values."""
    values = {word.partition("=")[2]: None for word in words if word.startswith(f"{key}=")}
    if len(values) > 1:
        first, second = [*values][:2]
        raise ConfigError(f"{key} is given twice: {key}={first} and {key}={second}")


def yaml_values(words: Iterable[str]) -> dict[str, Any]:
    """The values of `key=value` words, as YAML has them."""
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}


def require_folders(runs: Iterable[str]) -> None:
    """ConfigError for a run that is no folder."""
    for run in runs:
        if not Path(run).is_dir():
            raise ConfigError(f"{run} is not a folder; give a run folder (it contains run.yaml)")


def require_datasets(folders: Iterable[str]) -> None:
    """ConfigError for a local folder without a dataset."""
    for folder in folders:
        file = Path(folder) / "meta" / "info.json"
        if "://" not in folder and not file.exists():
            raise ConfigError(f"{folder} holds no dataset (there is no {file})")


INPUTS = {
    "init": "a run folder, ws://HOST:PORT or the YAML file of a policy server",
    "resume": "a run folder (it contains run.yaml)",
    "demos": "a dataset folder (it contains meta/info.json) or hf://owner/name",
}
"""Settings that name a file or folder to read, and what that is."""


def require_inputs(words: Sequence[str]) -> None:
    """ConfigError for inputs that do not exist, before anything that takes time is imported."""
    for key, value in named(words, INPUTS)[0].items():
        path = (value or "").strip("\"'")  # Python's words are quoted
        local = path not in ("", "null") and not re.search(r"[\[{]|://", path)
        if local and not Path(path).exists():
            raise ConfigError(f"{key}={path}: {path} does not exist; give {INPUTS[key]}")


def require_at_least(node: Node, least: Mapping[str, float]) -> None:
    """ConfigError for a number of `node` ("eval.episodes") below its minimum."""
    for key, low in least.items():
        value = node
        for name in key.split("."):
            value = value[name]
        if isinstance(value, int | float) and value < low:
            raise ConfigError(f"{key}={value} should be at least {low:g}")
