"""Inspect, edit and check demonstration datasets."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodied.commands import is_true, require_datasets, yaml_values
from embodied.core.build import ConfigError, parse
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
    (name,) = args.names
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
    settings = yaml_values(args.words)
    if settings.pop("quality", False):
        _print_quality(episodes, settings)
    elif settings:
        raise ConfigError(f"{min(settings)} has no effect without quality=true")


def _print_quality(episodes: Episodes, settings: dict[str, Any]) -> None:
    """Beside the dataset reference=DIR if there is one."""
    other = settings.pop("reference", None)
    reference = None
    if other is not None:
        require_datasets([other])
        reference = in_order_of(read_episodes(local_folder(other)), episodes.spec, other)
    for what, value in quality(episodes, parse(Config, settings, "quality"), reference).rows():
        print(f"  {what}: {value}")


def merge(args: argparse.Namespace) -> None:
    _say(args.own["out"], edit.merge(args.names, args.own["out"]))


def drop(args: argparse.Namespace) -> None:
    numbers = args.own["episodes"]
    out = args.own["out"]
    if (numbers is not None) == is_true(args.own, "failed"):
        raise ConfigError("say which episodes to drop: episodes=3,7-9 or failed=true")
    choose = edit.failed if numbers is None else edit.numbered(numbers)
    _say(out, edit.drop(args.names[0], out, choose))


def split(args: argparse.Namespace) -> None:
    own, (source,) = args.own, args.names
    seed = None if own["seed"] == "null" else _number(own, "seed", int) or 0
    how = edit.Split(_number(own, "share", float), _number(own, "episodes", int), seed)
    first, second = edit.split(source, own["out"], own["rest"], how)
    _say(own["out"], first)
    _say(own["rest"], second)


def rotate(args: argparse.Namespace) -> None:
    own, (source,) = args.own, args.names
    first = _number(own, "first", int)
    rotation = transform.Rotation(own["column"], own["from"], own["to"], first)
    _say(own["out"], transform.rotate(source, own["out"], rotation))


def relative(args: argparse.Namespace) -> None:
    """Also the inverse, `absolute`."""
    own, (source,) = args.own, args.names
    keep = tuple(filter(None, (own["keep"] or "").strip("[]").replace(" ", "").split(",")))
    pose = _number(own, "pose", int) or 0
    relation = transform.Relation(own["state"] or "observation.state", keep, pose, own["rotation"])
    made = transform.relative(source, own["out"], relation, args.kind == "absolute")
    _say(own["out"], made)


def points(args: argparse.Namespace) -> None:
    own, (source,) = args.own, args.names
    projection = parse(transform.Projection, yaml_values(args.words), "points")
    made = transform.points(source, own["out"], projection, own["from"], own["to"] or "points")
    _say(own["out"], made)


def mirror(args: argparse.Namespace) -> None:
    own, (source,) = args.own, args.names
    ours = Path(__file__).parent.parent / "embodiments" / f"{own['table']}_mirror.yaml"
    table = read_table(ours if ours.exists() else Path(own["table"]))
    _say(own["out"], mirrored(source, own["out"], table))


def retries(args: argparse.Namespace) -> None:
    _say(args.own["out"], split_retries(args.names[0], args.own["out"]))


def check(args: argparse.Namespace) -> None:
    """Print a table of what is wrong; exit status 1 where something is."""
    (source,), fix = args.names, args.own["fix"]
    found, episodes = edit.checked(source, parse(CheckConfig, yaml_values(args.words), "check"))
    for line in found[:SHOWN]:
        frame = "-" if line.frame is None else str(line.frame)
        print(f"episode {line.episode:>5}  frame {frame:>6}  {line.what}")
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    bad = sorted({line.episode for line in found})
    print(f"{source}: {len(bad)} of {episodes} episodes have findings ({len(found)} in all)")
    if fix is not None:
        _say(fix, edit.drop(source, fix, lambda _: bad))
    if found:
        raise SystemExit(FOUND)


def _number(own: dict[str, str | None], key: str, kind: Callable[[str], Any]) -> Any:
    value = own[key]
    if value in (None, "null"):
        return None
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value} should be a number") from error


def _say(out: str, made: Copied) -> None:
    print(f"{out}: {made.episodes} episodes, {made.steps:,} steps")
    for file in made.uncut:
        print(
            f"  {file.name} was copied whole: an episode in it does not begin with a key frame, so "
            "it keeps the pictures of episodes that were dropped"
        )
