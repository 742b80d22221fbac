"""Collect and convert demonstration datasets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from embodied.commands import take
from embodied.compose import compose, option, options, search_folders
from embodied.core.build import ConfigError, Node, parse
from embodied.policies.remote.address import allow_typed, is_address, remote_node


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
    if verbose:
        share = f"{kept} of {played} kept" if config.success_only else f"{kept}"
        print(f"{config.out}: {share}\nnext: embodied demos info {config.out}")
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
