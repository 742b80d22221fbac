"""Collect, convert, inspect, edit and check demonstration datasets."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.progress import Progress

from embodied.commands import require_datasets, split_words, take
from embodied.compose import compose, option, options, search_folders
from embodied.core.build import ConfigError, Node, nearest, parse
from embodied.datasets.hub import local_folder
from embodied.policies.remote.address import allow_typed, is_address, remote_node

if TYPE_CHECKING:
    from embodied.datasets.editing.write import Copied

FOUND = 1  # exit status of a check that found something
SHOWN = 200  # findings that are printed


def collect_command(args: argparse.Namespace) -> None:
    collect(args.words, args.config_dir)


def collect(
    words: list[str],
    folders: Sequence[str] = (),
    given: Mapping[str, Node] | None = None,
    verbose: bool = True,
) -> Path:
    """Record the episodes that the words of a command line ask for; returns the dataset folder.

    Prints progress and what to type next, unless `verbose` is false. `given`: options that are not
    files, as in `compose`.
    """
    run, words = take(words, "policy")
    if run is not None and is_address(run):
        allow_typed([run])
        given = {**(given or {}), "demonstrator/served": remote_node(run)[0]}
        words = ["demonstrator=served", *words]
    elif run is not None:
        words = ["demonstrator=trained", f"demonstrator.run={run}", *words]
    if not any(word.startswith("demonstrator=") for word in words):
        words = [*words, f"demonstrator={demonstrator_of(words, folders)}"]
    node = compose("collect", words, folders, given).node

    from embodied.datasets import collect as collecting

    config = parse(collecting.CollectConfig, node, "collect")
    try:
        with Progress(disable=not verbose) as progress:
            task = progress.add_task("episodes", total=config.episodes)
            kept, played = collecting.collect(
                config, lambda kept, played: progress.update(task, completed=kept)
            )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{config.out} keeps the recorded episodes; repeat the command to continue"
        ) from stop
    if not verbose:
        return Path(config.out)
    share = f"{kept} of {played} kept" if config.success_only else f"{kept}"
    print(f"{config.out}: {share}")
    print(f"next: embodied demos info {config.out}")
    return Path(config.out)


def demonstrator_of(words: Sequence[str], folders: Sequence[str]) -> str:
    """The demonstrator that has the name of the environment or of its task."""
    search = search_folders(folders)
    envs, known = options("env", search), options("demonstrator", search)
    env = next((word.split("=", 1)[1] for word in words if word.startswith("env=")), None)
    if env not in envs:
        return next(iter(known))  # compose() reports the error in env
    for name in [env, str(option(envs[env]).get("task"))]:
        if name in known:
            return name
    raise ConfigError(
        f"no demonstrator for {env}: demonstrator=NAME (known: {', '.join(known)}) or policy=RUN"
    )


def convert_command(args: argparse.Namespace) -> None:
    from embodied.importers import Bounds, convert

    bounds = Bounds(tuple(args.low or ()), tuple(args.high or ()))
    made = convert(args.format, args.source, args.out, args.dt, bounds=bounds, mask=args.mask)
    print(f"{args.out}: {made.episodes} episodes")
    if made.clipped:
        print(f"  {made.clipped} actions beyond their bounds were clipped, as the environment does")
    if made.empty:
        print(f"  left out, as they have no steps: {', '.join(made.empty)}")
    if made.masks and args.mask is None:
        masks = ", ".join(f"{name} {count}" for name, count in made.masks.items())
        print(f"  all episodes, whatever their mask ({masks}); --mask NAME reads those of one")
    print(f"next: embodied demos info {args.out}")


def info_command(args: argparse.Namespace) -> None:
    folders, words = split_words(args.words)
    name = _one(folders, "info")
    require_datasets([name])
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.datasets.lerobot.schema import read_info, skipped

    given = [word.partition("=") for word in words]
    settings = {key: value for key, _, value in given}
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
        ends = episodes.start + length
        won = sum(
            bool(episodes.steps["success"][a:b].any())
            for a, b in zip(episodes.start.tolist(), ends.tolist(), strict=True)
        )
        print(f"  success  {won} of {len(episodes)}")
    for text, count in Counter(episodes.words()).most_common():
        print(f"  task     {count:,} steps: {text}")
    for name in skipped(read_info(folder)):
        print(f"  not read {name}")
    if _value(settings, "quality", yaml.safe_load):
        # Print the quality of `episodes`, beside the dataset reference=DIR if there is one.
        from embodied.datasets.transitions import in_order_of
        from embodied.reports.quality import Config, quality

        other, reference = settings.get("reference"), None
        if other is not None:
            require_datasets([other])
            reference = in_order_of(read_episodes(local_folder(other)), episodes.spec, other)
        config = parse(Config, _read(settings, ("quality", "reference")), "quality")
        for what, value in quality(episodes, config, reference).rows():
            print(f"  {what}: {value}")
    elif settings.keys() - {"quality"}:
        raise ConfigError(f"{min(settings)} has no effect without quality=true")


def edit_command(args: argparse.Namespace) -> None:
    folders, words = split_words(args.words)
    require_datasets(folders)
    given = [word.partition("=") for word in words]
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


def rotate_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.transform import Rotation, rotate

    _known(settings, ("out", "column", "from", "to", "first"))
    source, out = _one(folders, "rotate"), _out(settings)
    if missing := [key for key in ("column", "from", "to") if key not in settings]:
        raise ConfigError(f"say what to rewrite: {missing[0]}=... (column=action from=quaternion)")
    first = _value(settings, "first", int)
    rotation = Rotation(settings["column"], settings["from"], settings["to"], first)
    _say(out, rotate(source, out, rotation))


def relative_command(folders: list[str], settings: dict[str, str]) -> None:
    _relate(folders, settings, back=False)


def absolute_command(folders: list[str], settings: dict[str, str]) -> None:
    _relate(folders, settings, back=True)


def _relate(folders: list[str], settings: dict[str, str], back: bool) -> None:
    from embodied.datasets.editing.transform import Relation, absolute, relative

    _known(settings, ("out", "state", "keep", "pose", "rotation"))
    source, out = _one(folders, "absolute" if back else "relative"), _out(settings)
    keep = tuple(filter(None, settings.get("keep", "").strip("[]").replace(" ", "").split(",")))
    pose = _value(settings, "pose", int) or 0
    state = settings.get("state", "observation.state")
    relation = Relation(state, keep, pose, settings.get("rotation"))
    _say(out, (absolute if back else relative)(source, out, relation))


def points_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.transform import Projection, points

    source, out = _one(folders, "points"), _out(settings)
    projection = parse(Projection, _read(settings, ("out", "from", "to")), "points")
    camera, name = settings.get("from"), settings.get("to", "points")
    _say(out, points(source, out, projection, camera, name))


def mirror_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.mirror import mirror, read_table

    _known(settings, ("out", "table"))
    source, out = _one(folders, "mirror"), _out(settings)
    if "table" not in settings:
        raise ConfigError("say whose reflection it is: table=fr3, table=so101 or table=FILE.yaml")
    name = settings["table"]
    ours = Path(__file__).parent.parent / "embodiments" / f"{name}_mirror.yaml"
    _say(out, mirror(source, out, read_table(ours if ours.exists() else Path(name))))


def retries_command(folders: list[str], settings: dict[str, str]) -> None:
    from embodied.datasets.editing.attempts import retries

    _known(settings, ("out",))
    out = _out(settings)
    _say(out, retries(_one(folders, "retries"), out))


def check_command(folders: list[str], settings: dict[str, str]) -> None:
    """Print a table of what is wrong; exit status 1 where something is."""
    from embodied.datasets.editing.check import CheckConfig
    from embodied.datasets.editing.edit import checked

    source = _one(folders, "check")
    found, episodes = checked(source, parse(CheckConfig, _read(settings, ("fix",)), "check"))
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


def _read(settings: Mapping[str, str], others: tuple[str, ...]) -> dict[str, Any]:
    """The settings but `others` as plain values."""
    return {key: yaml.safe_load(value) for key, value in settings.items() if key not in others}


def _one(folders: list[str], kind: str) -> str:
    if len(folders) != 1:
        raise ConfigError(f"name one dataset: embodied demos {kind} DIR")
    return folders[0]


def _out(settings: Mapping[str, str]) -> str:
    if "out" not in settings:
        raise ConfigError("the result needs a new folder: out=DIR")
    return settings["out"]


def _value(settings: Mapping[str, str], key: str, kind: Callable[[str], Any]) -> Any:
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
    "rotate": rotate_command,
    "relative": relative_command,
    "absolute": absolute_command,
    "points": points_command,
    "mirror": mirror_command,
    "retries": retries_command,
    "check": check_command,
}
