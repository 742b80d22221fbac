"""Collect, convert, inspect, edit and check demonstration datasets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embodied.commands import add_overrides, require_at_least, require_datasets, take
from embodied.commands.demos import editing
from embodied.core.build import ConfigError

WORDS = "collect|convert|info|merge|drop|split|check"


def add(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar=WORDS, required=True)
    collecting = kinds.add_parser("collect", help="record episodes of a scripted or trained policy")
    add_overrides(
        collecting, "env=, out=, episodes=, demonstrator= or policy=RUN, seed=, success_only=, ..."
    )
    converting = kinds.add_parser("convert", help="convert robomimic, ManiSkill or Minari datasets")
    converting.add_argument("format", metavar="FORMAT", help="robomimic, maniskill, minari")
    converting.add_argument("source", metavar="IN", type=Path)
    converting.add_argument("out", metavar="OUT", type=Path)
    converting.add_argument("--dt", type=float, help="control period in s, if not in the file")
    showing = kinds.add_parser("info", help="number of episodes, lengths, observations, success")
    showing.add_argument("folder", metavar="DIR", help="or hf://owner/name@revision")
    editing.add(kinds)
    parser.epilog = (
        "examples:\n"
        "  embodied demos collect env=fr3_lift episodes=50 out=outputs/demos\n"
        "  embodied demos collect env=fr3_push demonstrator.quality=0.5 out=outputs/mixed\n"
        "  embodied demos collect env=hopper policy=outputs/hopper_sac-0 demonstrator.noise=0.3 "
        "success_only=false out=outputs/medium\n"
        "  embodied demos convert robomimic low_dim.hdf5 outputs/can\n"
        "  embodied demos info outputs/demos\n"
        "  embodied demos check outputs/demos fix=outputs/clean\n"
        "  embodied demos drop outputs/demos episodes=3,7-9 out=outputs/kept\n"
        "  embodied demos merge outputs/a outputs/b out=outputs/both\n"
        "  embodied demos split outputs/demos share=0.9 out=outputs/train rest=outputs/test"
    )


def run(args: argparse.Namespace) -> None:
    own = {"collect": collect_command, "convert": convert_command, "info": info_command}
    own.get(args.kind, editing.run)(args)


def collect_command(args: argparse.Namespace) -> None:
    collect(args.words, args.config_dir)


def collect(words: list[str], folders: Sequence[str] = ()) -> Path:
    """Record the episodes that the words of a command line ask for; returns the dataset folder."""
    from embodied.compose import compose

    run, words = take(words, "policy")
    if run is not None:
        words = ["demonstrator=trained", f"demonstrator.run={run}", *words]
    if not any(word.startswith("demonstrator=") for word in words):
        words = [*words, f"demonstrator={demonstrator_of(words, folders)}"]
    node = compose("collect", words, folders).node

    from rich.progress import Progress

    from embodied.core.build import parse
    from embodied.datasets import collect as collecting

    config = parse(collecting.CollectConfig, node, "collect")
    require_at_least(node, {"episodes": 1, "num_envs": 1, "seed": 0})
    try:
        with Progress() as progress:
            task = progress.add_task("episodes", total=config.episodes)
            kept, played = collecting.collect(
                config, lambda kept, played: progress.update(task, completed=kept)
            )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{config.out} keeps the recorded episodes; repeat the command to continue"
        ) from stop
    share = f"{kept} of {played} kept" if config.success_only else f"{kept}"
    print(f"{config.out}: {share}")
    print(f"next: embodied demos info {config.out}")
    return Path(config.out)


def demonstrator_of(words: Sequence[str], folders: Sequence[str]) -> str:
    """The demonstrator that has the name of the environment or of its task."""
    from embodied.compose import option, options, search_folders

    search = search_folders(folders)
    envs, known = options("env", search), options("demonstrator", search)
    env = next((word.split("=", 1)[1] for word in words if word.startswith("env=")), None)
    if env not in envs:
        return next(iter(known))  # compose() reports the error in env
    names = [env, str(option(envs[env]).get("task"))]
    for name in names:
        if name in known:
            return name
    raise ConfigError(
        f"no demonstrator for {env}: demonstrator=NAME (known: {', '.join(known)}) or policy=RUN"
    )


def convert_command(args: argparse.Namespace) -> None:
    from embodied.datasets.importers import convert

    count = convert(args.format, args.source, args.out, args.dt)
    print(f"{args.out}: {count} episodes\nnext: embodied demos info {args.out}")


def info_command(args: argparse.Namespace) -> None:
    require_datasets([args.folder])
    from embodied.datasets.hub import local_folder
    from embodied.datasets.lerobot.reader import read_episodes

    episodes = read_episodes(local_folder(args.folder))
    length, spec = episodes.length, episodes.spec
    print(f"{args.folder}: {len(episodes)} episodes, {int(length.sum()):,} steps")
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
    if spec.text:
        print(f"  task     {spec.text}")
