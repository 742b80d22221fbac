"""Inspect, edit and check demonstration datasets."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import require_datasets, split_words
from embodied.core.build import ConfigError, nearest, parse
from embodied.datasets.editing import edit, transform
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.rewritten import mirror as mirrored
from embodied.datasets.editing.rewritten import read_table
from embodied.datasets.editing.rewritten import retries as split_retries
from embodied.datasets.editing.write import Copied
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.lerobot.schema import read_info, skipped
from embodied.datasets.transitions import in_order_of
from embodied.reports.quality import Config, quality

FOUND = 1  # exit status of a check that found something
SHOWN = 200  # findings that are printed


def info(args: argparse.Namespace) -> None:
    name, settings = _one(args)
    folder = local_folder(name)
    episodes = read_episodes(folder)
    length, spec = episodes.length, episodes.spec
    print(f"{name}: {len(episodes)} episodes, {int(length.sum()):,} steps")
    print(
        f"  length   {int(length.min())} to {int(length.max())}, mean {length.float().mean():.1f}"
    )
    print(f"  period   {spec.dt:g} s")
    print(f"  action   {list(spec.act.shape)} {' '.join(spec.act.names)}")
    for name, leaf in spec.obs.items():
        print(f"  obs      {name} {leaf.dtype}{list(leaf.shape)}")
    if "success" in episodes.steps:
        parts = episodes.steps["success"].split(length.tolist())
        print(f"  success  {sum(bool(part.any()) for part in parts)} of {len(episodes)}")
    for text, count in Counter(episodes.words()).most_common():
        print(f"  task     {count:,} steps: {text}")
    for name in skipped(read_info(folder)):
        print(f"  not read {name}")
    if yaml.safe_load(settings.get("quality", "false")):
        _print_quality(episodes, settings)
    elif settings.keys() - {"quality"}:
        raise ConfigError(f"{min(settings)} has no effect without quality=true")


def _print_quality(episodes: Episodes, settings: dict[str, str]) -> None:
    """Beside the dataset reference=DIR if there is one."""
    other, reference = settings.get("reference"), None
    if other is not None:
        require_datasets([other])
        reference = in_order_of(read_episodes(local_folder(other)), episodes.spec, other)
    config = parse(Config, _plain(settings, "quality", "reference"), "quality")
    for what, value in quality(episodes, config, reference).rows():
        print(f"  {what}: {value}")


def merge(args: argparse.Namespace) -> None:
    folders, given = _given(args)
    _known(given, "out")
    if len(folders) < 2:
        raise ConfigError("name the datasets to merge: embodied demos merge A B out=DIR")
    out = _out(given)
    _say(out, edit.merge(folders, out))


def drop(args: argparse.Namespace) -> None:
    source, given = _one(args, "out", "episodes", "failed")
    by_result = given.get("failed", "false")
    if by_result not in ("true", "false"):
        raise ConfigError(f"failed={by_result} should be true or false")
    if ("episodes" in given) == (by_result == "true"):
        raise ConfigError("say which episodes to drop: episodes=3,7-9 or failed=true")
    choose = edit.failed if by_result == "true" else edit.numbered(given["episodes"])
    _say(_out(given), edit.drop(source, _out(given), choose))


def split(args: argparse.Namespace) -> None:
    source, given = _one(args, "out", "rest", "share", "episodes", "seed")
    if "rest" not in given:
        raise ConfigError("the other part needs a folder, too: rest=DIR")
    seed = None if given.get("seed") == "null" else _number(given, "seed", int) or 0
    how = edit.Split(_number(given, "share", float), _number(given, "episodes", int), seed)
    first, second = edit.split(source, _out(given), given["rest"], how)
    _say(_out(given), first)
    _say(given["rest"], second)


def rotate(args: argparse.Namespace) -> None:
    source, given = _one(args, "out", "column", "from", "to", "first")
    out = _out(given)
    if missing := [key for key in ("column", "from", "to") if key not in given]:
        raise ConfigError(f"say what to rewrite: {missing[0]}=... (column=action from=quaternion)")
    first = _number(given, "first", int)
    rotation = transform.Rotation(given["column"], given["from"], given["to"], first)
    _say(out, transform.rotate(source, out, rotation))


def relative(args: argparse.Namespace) -> None:
    """Also the inverse, `absolute`."""
    source, given = _one(args, "out", "state", "keep", "pose", "rotation")
    out = _out(given)
    keep = tuple(filter(None, given.get("keep", "").strip("[]").replace(" ", "").split(",")))
    pose = _number(given, "pose", int) or 0
    state = given.get("state", "observation.state")
    relation = transform.Relation(state, keep, pose, given.get("rotation"))
    _say(out, transform.relative(source, out, relation, args.kind == "absolute"))


def points(args: argparse.Namespace) -> None:
    source, given = _one(args)
    out = _out(given)
    projection = parse(transform.Projection, _plain(given, "out", "from", "to"), "points")
    camera, name = given.get("from"), given.get("to", "points")
    _say(out, transform.points(source, out, projection, camera, name))


def mirror(args: argparse.Namespace) -> None:
    source, given = _one(args, "out", "table")
    if "table" not in given:
        raise ConfigError("say whose reflection it is: table=fr3, table=so101 or table=FILE.yaml")
    name = given["table"]
    ours = Path(__file__).parent.parent / "embodiments" / f"{name}_mirror.yaml"
    table = read_table(ours if ours.exists() else Path(name))
    _say(_out(given), mirrored(source, _out(given), table))


def retries(args: argparse.Namespace) -> None:
    source, given = _one(args, "out")
    _say(_out(given), split_retries(source, _out(given)))


def check(args: argparse.Namespace) -> None:
    """Print a table of what is wrong; exit status 1 where something is."""
    source, given = _one(args)
    found, episodes = edit.checked(source, parse(CheckConfig, _plain(given, "fix"), "check"))
    for line in found[:SHOWN]:
        frame = "-" if line.frame is None else str(line.frame)
        print(f"episode {line.episode:>5}  frame {frame:>6}  {line.what}")
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    bad = sorted({line.episode for line in found})
    print(f"{source}: {len(bad)} of {episodes} episodes have findings ({len(found)} in all)")
    if "fix" in given:
        _say(given["fix"], edit.drop(source, given["fix"], lambda _: bad))
    if found:
        raise SystemExit(FOUND)


def _given(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    folders, words = split_words(args.words)
    pairs = [word.partition("=") for word in words]
    return folders, {key: value for key, _, value in pairs}


def _one(args: argparse.Namespace, *names: str) -> tuple[str, dict[str, str]]:
    """The dataset and the settings, which are some of `names` (none: any)."""
    folders, given = _given(args)
    if len(folders) != 1:
        raise ConfigError(f"name one dataset: embodied demos {args.kind} DIR")
    if names:
        _known(given, *names)
    return folders[0], given


def _known(given: dict[str, str], *names: str) -> None:
    for key in given:
        if key not in names:
            raise ConfigError(f"there is no setting {key}{nearest(key, names)}")


def _plain(given: dict[str, str], *others: str) -> dict[str, Any]:
    """The settings but `others` as plain values."""
    return {key: yaml.safe_load(value) for key, value in given.items() if key not in others}


def _out(given: dict[str, str]) -> str:
    if "out" not in given:
        raise ConfigError("the result needs a new folder: out=DIR")
    return given["out"]


def _number(given: dict[str, str], key: str, kind: Callable[[str], Any]) -> Any:
    if given.get(key) in (None, "null"):
        return None
    try:
        return kind(given[key])
    except ValueError as error:
        raise ConfigError(f"{key}={given[key]} should be a number") from error


def _say(out: str, made: Copied) -> None:
    print(f"{out}: {made.episodes} episodes, {made.steps:,} steps")
    for file in made.uncut:
        print(
            f"  {file.name} was copied whole: an episode in it does not begin with a key frame, so "
            "it keeps the pictures of episodes that were dropped"
        )
