"""Train a policy, resume an interrupted run, or fit a model of an environment."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from embodied.commands import is_given, require_inputs, take
from embodied.compose import compose, options, read_override, search_folders
from embodied.core.atomic_write import locked
from embodied.core.build import ConfigError, Node, nearest, parse
from embodied.core.saved_node import read_run_settings

if TYPE_CHECKING:
    from embodied.models.dynamics import Fit
    from embodied.training.logger import Log
    from embodied.training.trainer import Callback


def run(args: argparse.Namespace) -> None:
    with session(args.words, args.config_dir) as (node, log):
        from embodied.training.train import train as train_node

        train_node(node, log)


def resume(args: argparse.Namespace) -> None:
    train([*args.words, f"resume={args.path}"], args.config_dir)


def train(
    words: Sequence[str],
    folders: Sequence[str] = (),
    verbose: bool = True,
    given: Mapping[str, Node] | None = None,
    callback: Callback | None = None,
) -> Path:
    """Compose the configuration, train and write a report; returns the run folder.

    Prints the settings, progress and what to type next, unless `verbose` is false. `given`: options
    that are not files, as in `compose`. `callback` is called at intervals.
    """
    with session(words, folders, verbose, given) as (node, log):
        from embodied.training.train import train as train_node

        return train_node(node, log, callback)


@contextmanager
def session(
    words: Sequence[str],
    folders: Sequence[str] = (),
    verbose: bool = True,
    given: Mapping[str, Node] | None = None,
) -> Generator[tuple[Node, Log]]:
    """The settings of the run that `words` describe and its log, for the training in the block.

    What stops the training says how to resume it; after it the report is written.
    """
    require_inputs(words)
    resume, others = take(words, "resume")
    if resume in (None, "", "null"):
        node, step = fresh(words, folders, given), 0
        resume = None
    else:
        node, step = resumed(Path(resume), others, folders)
    if is_given(words, "init"):
        from embodied.policies.remote.address import allow_typed

        allow_typed(words)
    from embodied.core import distributed

    others = distributed.rank() > 0  # only one process of torchrun writes
    with nullcontext() if others else locked(node["out"]):
        if resume and not others:
            _set_aside(Path(resume), step)
        elif not others:
            require_new(Path(node["out"]))  # another process may just have ended
        with _logged(node, step, others, verbose) as log:
            yield node, log


def _set_aside(path: Path, step: int) -> None:
    """Rename the damaged checkpoints that are newer than that of `step`, from which the run at
    `path` goes on; one line for each."""
    from embodied.core import checkpoint

    saved, damaged = checkpoint.newest_whole(path)
    if int(saved.name) != step:
        raise ConfigError(f"{path} has gone on meanwhile: type the command again")
    for folder, wrong in damaged.items():
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        line = f"{folder} is damaged ({wrong}) and is now {aside.name}: going on from {saved.name}"
        print(f"embodied: {line}", file=sys.stderr, flush=True)


@contextmanager
def _logged(node: Node, step: int, others: bool, verbose: bool) -> Generator[Log]:
    """The log of a training in the block, and its report; `others`: not the first process."""
    from embodied.core.errors import RemoteError, RobotError
    from embodied.training.config import facts, read_config
    from embodied.training.logger import Log

    config = read_config(node)
    folder = Path(config.out)
    with Log(folder, node["log"], silent=others) as log:
        log.begin(facts(config), config.total_steps, step, node, verbose)
        try:
            yield log
        except KeyboardInterrupt as stop:
            log.close()
            raise KeyboardInterrupt(
                _how_to_resume(folder) or "no checkpoint was saved yet"
            ) from stop
        except (RobotError, RemoteError) as error:
            if resume := _how_to_resume(folder):
                error.args = (f"{error}; {resume}",)
            raise
    if not others:
        from embodied.reports import run_report

        written = run_report.write(folder)
        if verbose:
            print(f"\n{run_report.summary(folder)}")
            print(f"  report      {written}")
            print(f"  checkpoint  {folder}/checkpoints")
            for film in sorted(folder.glob("videos/*.mp4")):
                print(f"  video       {film}")
            print(run_report.next_lines(folder))


def _how_to_resume(folder: Path) -> str:
    """Empty where no checkpoint was saved."""
    from embodied.core import checkpoint
    from embodied.reports import run_report

    try:
        saved = checkpoint.find(folder)
    except checkpoint.CheckpointError:
        return ""
    allow = run_report.allow_word(folder)
    return f"saved {saved}; resume with: embodied train resume={folder}{allow}"


def fresh(
    words: Sequence[str], folders: Sequence[str], given: Mapping[str, Node] | None = None
) -> Node:
    if not {"experiment", "env", "demos"} & {read_override(word).key for word in words}:
        raise ConfigError(
            "no experiment is given: experiment=NAME (embodied list experiments), "
            "or env=NAME policy=NAME learner=NAME, or demos=DIR policy=NAME learner=imitate"
        )
    made = compose("train", words, folders, given)
    node, choices = made.node, made.choices
    for group, other in (("env", "demos"), ("policy", "finetune")):
        if node.get(group) is None and node.get(other) is None:
            known = options(group, search_folders(folders))
            raise ConfigError(f"{group} is not given: {group}=NAME{nearest('', known)}")
    parts = [choices.get(group) for group in ("env", "policy", "learner", "finetune")]
    if parts[0] == "gym":  # any Gymnasium environment: its id says more
        parts[0] = str(node["env"]["id"]).replace("/", "_").replace(":", "_")
    if not parts[0]:  # without an environment: the name of the dataset's folder, or the hub's
        first = node["demos"] if isinstance(node["demos"], str) else str(node["demos"][0])
        parts[0] = first.partition("@")[0].rstrip("/").rpartition("/")[2] or "dataset"
    name = node["name"] or choices.get("experiment") or "-".join(part for part in parts if part)
    node["name"] = name
    size = choices.get("size") or "full"
    # Runs of other seeds or sizes must not share a folder.
    marks = [str(name), *([] if size == "full" else [size]), str(node["seed"])]
    node["out"] = str(node["out"] or Path("outputs") / "-".join(marks))
    require_new(Path(node["out"]))
    return node


def require_new(folder: Path) -> None:
    if any(folder.glob("checkpoints/[0-9]*")):
        raise ConfigError(
            f"{folder} already holds a run: resume it with resume={folder}, or choose another "
            "folder: out=DIR"
        )


def resumed(path: Path, words: Sequence[str], folders: Sequence[str]) -> tuple[Node, int]:
    """The settings of the run at `path`, with the changes that `words` ask for; its step."""
    from embodied.core import checkpoint

    saved, damaged = checkpoint.newest_whole(path)
    folder = saved.parent.parent
    if not (folder / "run.yaml").exists():
        raise ConfigError(f"{folder}/run.yaml is missing: {folder} cannot be resumed")
    if not saved.name.isdecimal():
        raise ConfigError(f"{saved} should have the name of its step, such as 00020000")
    settings = read_run_settings(folder / "run.yaml")
    before, step = settings.get("steps"), int(saved.name)
    settings |= {"allow": [], "out": str(folder), "resume": str(saved if damaged else path)}
    node = compose("run", words, folders, {"run": settings}).node
    asked = node.get("steps")
    if isinstance(before, int) and isinstance(asked, int) and asked < min(before, step):
        raise ConfigError(
            f"{folder} has {step:,} steps, and steps={asked} asks for fewer: name more, or "
            "begin another run: out=DIR"
        )
    return node, step


def model(args: argparse.Namespace) -> None:
    require_inputs(args.words)
    node = compose("model_train", args.words, args.config_dir).node

    import torch

    from embodied.models.train import TrainConfig, require_new, train

    config: TrainConfig = parse(TrainConfig, node, "embodied model train")
    require_new(config.out)
    torch.set_num_threads(config.threads)
    try:
        with Progress() as bar:
            task = bar.add_task("updates", total=None)

            def show(updates: int, most: int, error: float) -> None:
                text = f"updates (at most {most:,}), held-out error {error:.4g}"
                bar.update(task, completed=updates, total=most, description=text)

            model, fit = train(config, show)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("nothing was saved; model.most_updates=N ends sooner") from stop
    print(card(config.out, fit))
    for name, text in model.texts().items():
        if name.endswith(".txt"):
            print(f"{config.out}/{name}:\n{text}", end="")
    starts = config.demos if isinstance(config.demos, str) else config.demos[0]
    print(f"next: embodied train env=imagined env.model={config.out} env.starts={starts} ...")


def card(out: str, fit: Fit) -> str:
    from embodied.reports.page import columns

    head = ("output", "unit", "error", "spread", "explained")
    body = [
        (o.name, o.unit, f"{o.error:.4g}", f"{o.spread:.4g}", f"{o.explained:.1%}")
        for o in fit.outputs
    ]
    facts = ", ".join(f"{key} {value}" for key, value in fit.facts.items())
    return "\n".join([f"{out}: {facts}", *(f"  {line}" for line in columns([head, *body]))])
