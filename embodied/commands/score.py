"""Score policies from recordings, without acting: fitted Q evaluation, importance sampling, DR."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodied.commands import print_rows, require_datasets, require_folders, take
from embodied.core.build import ConfigError

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes
    from embodied.evaluation.off_policy import Config, Estimates

ESTIMATORS = ("fqe", "pdis", "dr")
FIRST = 10_000
"""Seed of the held-out initial states, as in `embodied eval`."""


def run(args: argparse.Namespace) -> None:
    runs, words = listed(args.words, "policies")
    demos, words = listed(words, "demos")
    if not runs or not demos:
        raise ConfigError("embodied score policies=[RUN,RUN,...] demos=DIR [truth=100 k=2]")
    require_folders(runs)
    require_datasets(demos)
    from embodied.core.build import parse
    from embodied.datasets.hub import local_folder
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.datasets.transitions import in_order_of, joined
    from embodied.evaluation.off_policy import Config

    names = [field.name for field in fields(Config)]
    own = [word for word in words if word.partition("=")[0] in names]
    truth, words = whole([word for word in words if word not in own], "truth", 0)
    k, words = whole(words, "k", 2)
    if words and not truth:
        raise ConfigError(f"{words[0]} has no effect without truth=EPISODES")
    if not 2 <= k <= len(runs) + 1:
        raise ConfigError(f"k={k} is not in 2..{len(runs) + 1} (the policies and the behaviour)")
    given = [word.partition("=") for word in own]
    config = parse(Config, {key: yaml.safe_load(value) for key, _, value in given}, "score")
    parts = [read_episodes(local_folder(path)) for path in demos]
    episodes = joined([in_order_of(part, parts[0].spec, "demos") for part in parts])
    found = scores(runs, episodes, config)
    behaviour, true = behaviour_value(episodes, config.gamma), None
    if truth:
        true = [played(run, words, args.config_dir, truth, config.gamma) for run in runs]
    print_scores(runs, found, behaviour, true)
    print_portfolios(runs, found, behaviour, true, k)


def listed(words: list[str], name: str) -> tuple[list[str], list[str]]:
    """The folders of NAME=A or NAME=[A,B], and the other words."""
    value, rest = take(words, name)
    folders = value.strip("[]").split(",") if value else []
    return [folder.strip() for folder in folders if folder.strip()], rest


def whole(words: list[str], name: str, usual: int) -> tuple[int, list[str]]:
    """The whole number of NAME=N, and the other words."""
    value, rest = take(words, name)
    if value is None:
        return usual, rest
    if not value.isdecimal():
        raise ConfigError(f"{name}={value} should be a whole number")
    return int(value), rest


def scores(runs: Sequence[str], episodes: Episodes, config: Config) -> list[Estimates]:
    """The estimates of each run's policy, which executes as many steps of a chunk as in its run."""
    from embodied.commands.eval import trained_with
    from embodied.core import checkpoint
    from embodied.evaluation.off_policy import Recorded, estimate

    known: dict[int, Recorded] = {}
    found: list[Estimates] = []
    for path in runs:
        policy = checkpoint.load_policy(path, episodes.spec).eval()
        trained = trained_with(checkpoint.find(Path(path)), named=True)
        execute = trained.get("execute") or policy.chunk
        if execute not in known:
            known[execute] = Recorded(episodes, config, execute)
        found.append(estimate(policy, known[execute]))
    return found


def behaviour_value(episodes: Episodes, gamma: float) -> float:
    from embodied.buffers.weighted import returns

    return returns(episodes, gamma).mean().item()


def played(path: str, words: list[str], folders: list[str], episodes: int, gamma: float) -> float:
    """The mean discounted return of a run's policy in `episodes` episodes of its environment, or
    the one that the words of a command line name."""
    from itertools import islice

    import torch

    from embodied.commands.eval import run_subject
    from embodied.core.build import build
    from embodied.core.env import VecEnv
    from embodied.datasets.collect import play_with_text

    subject = run_subject(Path(path), words, folders)
    env = build(subject.env | {"num_envs": min(episodes, 16)}, VecEnv)
    try:
        policy = subject.make(env.spec).eval()
        made = islice(play_with_text(policy, env, FIRST, subject.execute), episodes)
        rewards = [episode["reward"].double() for episode, _ in made]
    finally:
        env.close()
    values = [(each * gamma ** torch.arange(len(each))).sum().item() for each in rewards]
    return sum(values) / len(values)


def print_scores(
    runs: Sequence[str], found: Sequence[Estimates], behaviour: float, true: list[float] | None
) -> None:
    """A table of the policies, in the order given."""
    rows = [
        (name, *(f"{getattr(each, key):.3f}" for key in ESTIMATORS), f"{each.effective:.1f}")
        for name, each in zip(runs, found, strict=True)
    ]
    rows.append(("the recordings", *[f"{behaviour:.3f}"] * len(ESTIMATORS), ""))
    heads = ("policy", *(name.upper() for name in ESTIMATORS), "effective episodes")
    if true is not None:
        heads = (*heads, "true")
        rows = [(*row, f"{value:.3f}") for row, value in zip(rows, [*true, behaviour], strict=True)]
    print_rows(heads, rows)


def print_portfolios(
    runs: Sequence[str],
    found: Sequence[Estimates],
    behaviour: float,
    true: list[float] | None,
    k: int,
) -> None:
    """What each estimator would try; with true values, how good these choices are."""
    from embodied.evaluation.portfolio import portfolio
    from embodied.nn.statistics import spearman

    rows: list[tuple[Any, ...]] = []
    for name in ESTIMATORS:
        estimates = [float(getattr(each, name)) for each in found]
        names = [*runs, "the recordings"]
        ordered = sorted(zip([*estimates, behaviour], names, strict=True), key=lambda p: -p[0])
        chosen = ", ".join(Path(path).name for _, path in ordered[:k])
        if true is None:
            rows.append((name.upper(), chosen))
            continue
        one = portfolio(estimates, true, behaviour, k)
        numbers = (one.sharpe, one.gain, one.std, one.best, one.worst, one.regret, one.unsafe)
        rank = spearman(estimates, true)
        rows.append((name.upper(), chosen, *(f"{number:.3g}" for number in (*numbers, rank))))
    heads = ("estimator", f"the {k} to try")
    more = (f"SharpeRatio@{k}", "gain", "std", "best", "worst", "regret", "unsafe", "Spearman")
    print_rows(heads if true is None else (*heads, *more), rows)
