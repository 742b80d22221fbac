"""Subcommands of the command line: a table of their words, options and help texts, and their code.

`table.yaml` names the function that runs each (NAME.run unless it says another); `args.words`:
`key=value` overrides.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.errors import ContractError, RemoteError, RobotError

TYPES = {"path": Path, "int": int, "float": float}
ERRORS = {
    "CheckpointError": "embodied.core.checkpoint",
    "NotFinite": "embodied.core.env",
    "SpecMismatch": "embodied.core.spec",
    "DatasetError": "embodied.datasets.lerobot.schema",
    "ChatError": "embodied.llm.chat",
    "ClientError": "embodied.real_robot.daemon.client",
    "FolderError": "embodied.real_robot.daemon.server",
    "RequestError": "embodied.real_robot.daemon.requests",
    "RpcServerError": "embodied.real_robot.daemon.server",
    "DriverError": "embodied.real_robot.kernel.driver",
    "KeyFileError": "embodied.real_robot.remote",
}
"""Errors that say in one line what to do, and the modules that define them."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors of one line.

    `more_help` is asked for the end of the help when help is printed, and only then.
    """

    more_help: Callable[[], str] | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"'([^']*)'", found[2])
            raise ConfigError(f"there is no {self.prog} {found[1]}{nearest(found[1], known)}")
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def format_help(self) -> str:
        text = super().format_help()
        return text if self.more_help is None else f"{text}{self.more_help()}\n"


@cache
def table() -> dict[str, Any]:
    """The entries of all subcommands, by name."""
    return yaml.safe_load(Path(__file__).with_name("table.yaml").read_text())


def add(parser: argparse.ArgumentParser, entry: Mapping[str, Any], runs: str) -> None:
    """Add the arguments of a table's `entry` to `parser`; the function `runs` is imported when it
    is called."""
    for name, options in entry.get("arguments", {}).items():
        if name != "overrides":
            typed = {"type": TYPES[options["type"]]} if "type" in options else {}
            parser.add_argument(name, **{**options, **typed})
            continue
        parser.add_argument("words", nargs="*", metavar="key=value", help=options)
        parser.add_argument(
            "--config-dir",
            action="append",
            default=[],
            metavar="DIR",
            help="a folder with your own YAML groups (may be repeated; or set EMBODIED_CONFIGS)",
        )
    parser.epilog = entry.get("epilog")
    runs = entry.get("run", runs)
    parser.set_defaults(run=runs, first=entry.get("first"), needs=entry.get("needs"))
    if isinstance(parser, Parser) and "settings" in entry:
        parser.more_help = lambda: function("list.settings")(entry["settings"])
    if kinds := entry.get("kinds"):
        metavar = entry.get("metavar", "|".join(kinds))
        add_all(parser.add_subparsers(dest="kind", metavar=metavar, required=True), kinds, runs)


def add_all(
    subparsers: Any, entries: Mapping[str, Any], runs: str, only: str | None = None
) -> None:
    """Add a parser for each of `entries`; its arguments, too, but of the one named `only`."""
    for name, entry in entries.items():
        own = subparsers.add_parser(
            name,
            help=entry["help"],
            description=entry["help"],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            add(own, entry, runs or f"{name}.run")


def function(name: str) -> Callable[..., Any]:
    """The function of this package with the dotted `name`; imports its module."""
    module, _, own = f"{__name__}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), own)


def require_first(args: argparse.Namespace) -> None:
    """ConfigError for a run or a dataset that is not there, before the module is imported."""
    if args.needs is not None and not Path(args.path).is_dir():
        raise ConfigError(f"{args.path} is not a folder; give {args.needs}")
    if args.first == "runs":
        from embodied.policies.remote.address import is_address

        runs, _ = runs_in(args.words)
        require_folders(run for run in runs if not is_address(run))
    if args.first == "datasets":
        require_datasets(split_words(args.words)[0])


def take(words: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of the last `key=value` among `words` (None: not given), and the other words."""
    own = [word for word in words if word.startswith(f"{key}=")]
    rest = [word for word in words if word not in own]
    return (own[-1].partition("=")[2] if own else None), rest


def named(words: Sequence[str], keys: Iterable[str]) -> tuple[dict[str, str | None], list[str]]:
    """The values of `keys`, as `take` has them, and the other words."""
    found: dict[str, str | None] = {}
    rest = [*words]
    for key in keys:
        found[key], rest = take(rest, key)
    return found, rest


def require_one(words: Iterable[str], key: str) -> None:
    """ConfigError where `words` give `key` two values."""
    values = {word.partition("=")[2]: None for word in words if word.startswith(f"{key}=")}
    if len(values) > 1:
        first, second = [*values][:2]
        raise ConfigError(f"{key} is given twice: {key}={first} and {key}={second}")


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; where it is too narrow for its words and numbers, as plain columns."""
    from rich.console import Console
    from rich.table import Table

    lines = [heads, *rows]
    columns = [*zip(*lines, strict=True)]
    console = Console(markup=False, highlight=False)
    words = [[len(word) for cell in column for word in cell.split()] for column in columns]
    if sum(max(lengths, default=0) + 3 for lengths in words) < console.width:  # 3: the frame
        table = Table(*heads)
        for row in lines[1:]:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in columns]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def require_understood(words: Sequence[str], known: Iterable[str]) -> None:
    """ConfigError for the first of `words` that nobody took, with the nearest of `known`."""
    if words:
        raise ConfigError(f"{words[0]} is not understood{nearest(words[0], known)}")


def split_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words that are no `key=value`, and those that are."""
    words = [*words]  # `list` is a module here
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def runs_in(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words that are runs or policy servers, and the settings."""
    words = [*words]
    runs = [word for word in words if "=" not in word or Path(word).exists()]
    return runs, [word for word in words if word not in runs]


def yaml_values(words: Iterable[str]) -> dict[str, Any]:
    """The values of `key=value` words, as YAML has them."""
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}


def require_folders(runs: Iterable[str]) -> None:
    """ConfigError for a run that is no folder, before anything that takes time is imported."""
    for run in runs:
        if not Path(run).is_dir():
            raise ConfigError(f"{run} is not a folder; give a run folder (it contains run.yaml)")


INPUTS = {
    "init": "a run folder, ws://HOST:PORT or the YAML file of a policy server",
    "resume": "a run folder (it contains run.yaml)",
    "demos": "a dataset folder (it contains meta/info.json) or hf://owner/name",
}
"""Settings that name a file or folder to read, and what that is."""


def require_inputs(words: Sequence[str]) -> None:
    """ConfigError for inputs that do not exist, before anything that takes time is imported."""
    for key, what in INPUTS.items():
        value, _ = take(words, key)
        path = value.strip("\"'") if value is not None else ""  # Python's words are quoted
        local = path not in ("", "null") and not re.search(r"[\[{]|://", path)
        if local and not Path(path).exists():
            raise ConfigError(f"{key}={path}: {path} does not exist; give {what}")


def require_datasets(folders: Iterable[str]) -> None:
    """ConfigError for a local folder without a dataset, before torch is imported."""
    for folder in folders:
        file = Path(folder) / "meta" / "info.json"
        if "://" not in folder and not file.exists():
            raise ConfigError(f"{folder} holds no dataset (there is no {file})")


def require_at_least(node: Node, least: Mapping[str, float]) -> None:
    """ConfigError for a number of `node` ("eval.episodes") below its minimum."""
    for key, low in least.items():
        value = node
        for name in key.split("."):
            value = value[name]
        if isinstance(value, int | float) and value < low:
            raise ConfigError(f"{key}={value} should be at least {low:g}")


def answer(kind: str, word: str) -> str:
    """What to write in place of one of other libraries' "keywords" or "names"; "" if unknown."""
    from embodied.compose import other_words, ours

    here = ours(kind, word)
    if kind == "keywords" and (setting := ours("settings", word)):
        here = other_words()["python"].get(setting, f"{setting}=...")
    return here and f": write {here}"


def mistake(error: Exception) -> str | None:
    """The error message of a user error, in one line; None for a bug (which gets a traceback)."""
    if isinstance(error, tuple(_one_line_errors())):
        return " ".join(str(error).split())
    if isinstance(error, ValueError) and (where := _refused(error)) is not None:
        return f"{where}{' '.join(str(error).split())}"
    if isinstance(error, ModuleNotFoundError) and not _ours(error.name):
        return f'the package {error.name} is missing: pip install "embodied-rl[all]"'
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's
        return f"this needs more memory than there is: {str(error).partition(chr(10))[0][:200]}"
    return None


def _one_line_errors() -> Iterator[type[Exception]]:
    """The errors whose message is for the user, of those modules that are imported: torch is not
    imported to classify a mistake."""
    yield from (ConfigError, ContractError, RemoteError, RobotError)
    for name, place in ERRORS.items():
        if place in sys.modules:
            yield getattr(sys.modules[place], name)


def _refused(error: ValueError) -> str | None:
    """The prefix of an error about settings; None if the error is not about settings.

    Errors raised inside `build` get the name of the class that was built; those of our own
    constructors get none.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]  # `list` is a module here
    for frame, _ in frames:
        if frame.f_code is build.__code__:
            return f"{frame.f_locals['node'].get('_target_')}: "
    last, _ = frames[-1]
    ours = _ours(last.f_globals.get("__name__"))
    return "" if ours and last.f_code.co_name in ("__init__", "__post_init__") else None


def _ours(module: str | None) -> bool:
    return module is None or module.split(".")[0] == "embodied"
