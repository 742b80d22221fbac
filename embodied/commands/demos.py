"""Collect and convert demonstration datasets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from embodied.commands import is_given, take
from embodied.compose import compose, option, options, search_folders
from embodied.core.build import ConfigError, Node, parse
from embodied.core.saved_node import executed_steps
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
        from embodied.core import checkpoint

        words = ["demonstrator=trained", f"demonstrator.run={run}", *words]
        if (steps := executed_steps(checkpoint.find(run))) and not is_given(words, "execute"):
            words = [*words, f"execute={steps}"]
    if not is_given(words, "demonstrator"):
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
    """The demonstrator that has the name of the environment or of its task; ConfigError."""
    env, search = take(words, "env")[0], search_folders(folders)
    known = options("demonstrator", search)
    if env not in options("env", search):
        return next(iter(known))  # compose() reports the error in env
    if (found := usual_demonstrator(words, folders)) is None:
        names = ", ".join(known)
        raise ConfigError(
            f"no demonstrator for {env}: demonstrator=NAME (known: {names}) or policy=RUN"
        )
    return found


def usual_demonstrator(words: Sequence[str], folders: Sequence[str]) -> str | None:
    """The demonstrator that has the name of the environment or of its task, if there is one."""
    env, search = take(words, "env")[0], search_folders(folders)
    file = options("env", search).get(env or "")
    task = str(option(file).get("task")) if file else ""
    return next((name for name in (env, task) if name in options("demonstrator", search)), None)


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
