"""`embodied demos merge|drop|split|check`: edit recorded datasets, always into a new folder."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from embodied.commands import require_datasets
from embodied.core.build import ConfigError, nearest

if TYPE_CHECKING:
    from embodied.datasets.editing.write import Copied

FOUND = 1  # exit status of a check that found something
SHOWN = 200  # findings that are printed
HELP = {
    "merge": (
        "several datasets as one, in the order given",
        "two or more datasets with the same features and rate, and out=DIR",
    ),
    "drop": (
        "leave episodes out",
        "DIR; episodes=3,7-9 (from 0) or failed=true (no step is a success); out=DIR",
    ),
    "split": (
        "two datasets of one",
        "DIR; share=0.9 or episodes=50 of the first part; out=DIR rest=DIR; seed=0: which episodes "
        "(seed=null: the first ones)",
    ),
    "check": (
        "find episodes that should not be learnt from; exit status 1 where there are some",
        "DIR; dark=8 (mean brightness of 255), still=1 (s without motion), gap=1.5 (periods "
        "between steps), action=[LOW,HIGH] (limits), pictures=false (numbers only); fix=DIR: a "
        "copy without these episodes",
    ),
}


def add(kinds: Any) -> None:
    for kind, (sentence, words) in HELP.items():
        own = kinds.add_parser(kind, help=sentence, description=sentence)
        own.add_argument("words", nargs="*", metavar="DIR key=value", help=words)


def run(args: argparse.Namespace) -> None:
    folders = [word for word in args.words if "=" not in word]
    require_datasets(folders)
    given = [word.partition("=") for word in args.words if "=" in word]
    KINDS[args.kind](folders, {key: value for key, _, value in given})


def merge_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.edit import merge

    _known(settings, ("out",))
    if len(folders) < 2:
        raise ConfigError("name the datasets to merge: embodied demos merge A B out=DIR")
    out = _out(settings)
    _say(out, merge(folders, out))


def drop_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.edit import drop, failed, numbered

    _known(settings, ("out", "episodes", "failed"))
    source, out = _one(folders, "drop"), _out(settings)
    by_result = settings.get("failed", "false")
    if by_result not in ("true", "false"):
        raise ConfigError(f"failed={by_result} should be true or false")
    if ("episodes" in settings) == (by_result == "true"):
        raise ConfigError("say which episodes to drop: episodes=3,7-9 or failed=true")
    choose = failed if by_result == "true" else numbered(settings["episodes"])
    _say(out, drop(source, out, choose))


def split_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.edit import Split, split

    _known(settings, ("out", "rest", "share", "episodes", "seed"))
    source, out, rest = _one(folders, "split"), _out(settings), settings.get("rest")
    if rest is None:
        raise ConfigError("the other part needs a folder, too: rest=DIR")
    share, count = _value(settings, "share", float), _value(settings, "episodes", int)
    seed = None if settings.get("seed") == "null" else _value(settings, "seed", int)
    seed = 0 if seed is None and settings.get("seed") != "null" else seed
    first, second = split(source, out, rest, Split(share, count, seed))
    _say(out, first)
    _say(rest, second)


def check_command(folders: list[str], settings: dict[str, str]) -> None:
    """Print a table of what is wrong; exit status 1 where something is."""
    from embodied.core.build import parse
    from embodied.datasets.editing.check import CheckConfig
    from embodied.datasets.editing.edit import checked

    names = [field.name for field in dataclasses.fields(CheckConfig)]
    _known(settings, ("fix", *names))
    source = _one(folders, "check")
    node = {key: yaml.safe_load(settings[key]) for key in names if key in settings}
    found, episodes = checked(source, parse(CheckConfig, node, "check"))
    for line in [*found[:SHOWN]]:
        frame = "-" if line.frame is None else str(line.frame)
        print(f"episode {line.episode:>5}  frame {frame:>6}  {line.what}")
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    bad = sorted({line.episode for line in found})
    print(f"{source}: {len(bad)} of {episodes} episodes have findings ({len(found)} in all)")
    if "fix" in settings:
        from embodied.datasets.editing.edit import drop

        _say(settings["fix"], drop(source, settings["fix"], lambda _: bad))
    if found:
        raise SystemExit(FOUND)


def _known(settings: Mapping[str, str], names: tuple[str, ...]) -> None:
    for key in settings:
        if key not in names:
            raise ConfigError(f"there is no setting {key}{nearest(key, names)}")


def _one(folders: list[str], kind: str) -> str:
    if len(folders) != 1:
        raise ConfigError(f"name one dataset: embodied demos {kind} DIR")
    return folders[0]


def _out(settings: Mapping[str, str]) -> str:
    if "out" not in settings:
        raise ConfigError("the result needs a new folder: out=DIR")
    return settings["out"]


def _value(settings: Mapping[str, str], key: str, kind: type[float] | type[int]) -> Any:
    if settings.get(key) in (None, "null"):
        return None
    try:
        return kind(settings[key])
    except ValueError as error:
        raise ConfigError(f"{key}={settings[key]} should be a number") from error


def _say(out: str, made: Copied) -> None:
    print(f"{out}: {made.episodes} episodes, {made.steps:,} steps")
    for file in made.uncut:
        print(
            f"  {file.name} was copied whole: an episode in it does not begin with a key frame, so "
            "it keeps the pictures of episodes that were dropped"
        )


KINDS = {
    "merge": merge_command,
    "drop": drop_command,
    "split": split_command,
    "check": check_command,
}
