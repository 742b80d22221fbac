"""Score policies from recordings, without acting: fitted Q evaluation, importance sampling, DR."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from embodied.commands import print_rows, require_datasets, require_folders, take
from embodied.core.build import ConfigError

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes
    from embodied.evaluation.off_policy import Config, Estimates

FIRST = 10_000  # seed of the held-out initial states, as in `embodied eval`


def run(args: argparse.Namespace) -> None:
    runs, words = listed(args.words, "policies")
    demos, words = listed(words, "demos")
    if not runs or not demos:
        raise ConfigError("embodied score policies=[RUN,RUN,...] demos=DIR [truth=100 k=2]")
    require_folders(runs)
    require_datasets(demos)
    from embodied.buffers.weighted import returns
    from embodied.core.build import parse
    from embodied.datasets.hub import local_folder
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.datasets.transitions import in_order_of, joined
    from embodied.evaluation.off_policy import Config, PortfolioConfig, choice

    pairs = [word.partition("=") for word in words]
    given = {key: yaml.safe_load(value) for key, _, value in pairs}
    settings: list[dict[str, object]] = []
    for kind in (Config, PortfolioConfig):
        known = given.keys() & {field.name for field in fields(kind)}
        settings.append({key: given.pop(key) for key in known})
    config = parse(Config, settings[0], "score")
    trial = parse(PortfolioConfig, settings[1], "score")
    if given and not trial.truth:
        raise ConfigError(f"{min(given)} has no effect without truth=EPISODES")
    choice([0.0] * len(runs), 0.0, trial.k)  # ConfigError before the work begins
    parts = [read_episodes(local_folder(path)) for path in demos]
    episodes = joined([in_order_of(part, parts[0].spec, "demos") for part in parts])
    found = scores(runs, episodes, config)
    behaviour = returns(episodes, config.gamma).mean().item()
    more = [word for word in words if word.partition("=")[0] in given]
    true = [
        played(run, more, args.config_dir, trial.truth, config.gamma)
        for run in (runs if trial.truth else ())
    ]
    show(runs, found, behaviour, true, trial.k)


def listed(words: list[str], name: str) -> tuple[list[str], list[str]]:
    """The folders of NAME=A or NAME=[A,B], and the other words."""
    value, rest = take(words, name)
    folders = value.strip("[]").split(",") if value else []
    return [folder.strip() for folder in folders if folder.strip()], rest


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


def played(path: str, words: list[str], folders: list[str], episodes: int, gamma: float) -> float:
    """The mean discounted return of a run's policy in `episodes` episodes of its environment, or
    the one that the words of a command line name."""
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
    return sum((r * gamma ** torch.arange(len(r))).sum().item() for r in rewards) / episodes


def show(
    runs: Sequence[str],
    found: Sequence[Estimates],
    behaviour: float,
    true: Sequence[float],
    k: int,
) -> None:
    """Print the estimates, and which `k` policies each estimator would try; with `true` values,
    how good these choices are."""
    from embodied.evaluation.off_policy import choice, portfolio
    from embodied.nn.statistics import spearman

    names = [*runs, "the recordings"]
    last = [f"{value:.3f}" for value in [*true, behaviour]]
    rows = [(f"{e.fqe:.3f}", f"{e.pdis:.3f}", f"{e.dr:.3f}", f"{e.effective:.1f}") for e in found]
    rows.append(("", "", "", ""))
    columns = last if true else [""] * len(runs) + last
    lines = zip(names, rows, columns, strict=True)
    heads = ("policy", "FQE", "PDIS", "DR", "effective episodes", "true")
    print_rows(heads, [(name, *row, value) for name, row, value in lines])
    tries: list[tuple[str, ...]] = []
    for name in ("fqe", "pdis", "dr"):
        estimates = [float(getattr(each, name)) for each in found]
        tried = ", ".join(Path(names[i]).name for i in choice(estimates, behaviour, k))
        numbers: tuple[float, ...] = ()
        if true:
            p = portfolio(estimates, true, behaviour, k)
            numbers = (p.sharpe, p.gain, p.std, p.best, p.worst, p.regret, p.unsafe)
            numbers = (*numbers, spearman(estimates, true))
        tries.append((name.upper(), tried, *(f"{number:.3g}" for number in numbers)))
    more = (f"SharpeRatio@{k}", "gain", "std", "best", "worst", "regret", "unsafe", "Spearman")
    print_rows(("estimator", f"the {k} to try", *(more if true else ())), tries)
