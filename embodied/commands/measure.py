"""Measure without training: what can help a policy, what policies are worth by recordings, how far
random exploration has to look ahead in an environment."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from embodied.buffers.weighted import returns
from embodied.checks.choose import chosen_part
from embodied.commands import (
    require_at_least,
    require_datasets,
    require_folders,
    yaml_values,
)
from embodied.commands.eval import subject_of
from embodied.compose import allow_from, compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build, parse
from embodied.core.env import VecEnv
from embodied.datasets.collect import play
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.reader import DatasetError, Episodes, read_episodes
from embodied.datasets.transitions import in_order_of, joined
from embodied.evaluation.effective_horizon import Config as GorpConfig
from embodied.evaluation.effective_horizon import Gorp
from embodied.evaluation.loading import trained_with
from embodied.evaluation.off_policy import Config as EstimateConfig
from embodied.evaluation.off_policy import (
    Estimates,
    PortfolioConfig,
    choice,
    estimates,
    portfolio,
)
from embodied.improvement import diagnosis, pages
from embodied.improvement.advice import NOTHING, advise, measured
from embodied.nn.statistics import spearman
from embodied.policies.remote.address import is_address
from embodied.reports.quality import Config as QualityConfig
from embodied.reports.quality import quality
from embodied.reports.terminal import print_rows

FIRST = 10_000  # seed of the held-out initial states, as in `embodied eval`


def diagnose(args: argparse.Namespace) -> None:
    (run,) = args.names
    subject = subject_of(run, args.words, args.config_dir, "diagnose")
    node = subject.node
    usual = Path("outputs" if is_address(run) else subject.name) / "diagnosis"
    require_at_least(node, {"threads": 1})
    torch.set_num_threads(node["threads"])
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)

    recorded = [] if is_address(run) else _recordings(Path(run), say)
    config = parse(diagnosis.Config, {f.name: node[f.name] for f in fields(diagnosis.Config)}, "")
    found = diagnosis.diagnose(subject.make, subject.env, config, subject.execute, say)
    out = usual if node["out"] is None else Path(node["out"])
    page = pages.write_diagnosis(out, subject.name, subject.env, config, found, recorded)
    print_rows(("measured", ""), measured(found.diagnosis))
    if recorded:
        print_rows(("its recordings", ""), recorded)
    ways = [(each.way, f"+{each.gain:.0%}", each.reason) for each in advise(found.diagnosis)]
    if ways:
        print_rows(("what may help", "may add", "why"), ways)
    else:
        print(NOTHING)
    print(f"report: {page}")


def _recordings(run: Path, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """The quality of the recordings that a run was trained with, all together; none without any."""
    demos = trained_with(checkpoint.find(run), named=True).get("demos") or []
    paths = [demos] if isinstance(demos, str) else demos
    try:
        return quality(_joined(paths), QualityConfig()).rows() if paths else []
    except (ConfigError, DatasetError, OSError) as error:
        say(f"nothing is said of its recordings: {error}")
        return []


def _joined(paths: Sequence[str]) -> Episodes:
    parts = [read_episodes(local_folder(path)) for path in paths]
    return joined([in_order_of(part, parts[0].spec, "recordings") for part in parts])


def score(args: argparse.Namespace) -> None:
    """Fitted Q evaluation, importance sampling, DR."""
    runs, demos = _listed(args.own, "policies"), _listed(args.own, "demos")
    require_folders(runs)
    require_datasets(demos)
    given = yaml_values(args.words)
    kinds = (EstimateConfig, PortfolioConfig)
    own = [{f.name: given.pop(f.name) for f in fields(k) if f.name in given} for k in kinds]
    config = parse(EstimateConfig, own[0], "score")
    trial = parse(PortfolioConfig, own[1], "score")
    if given and not trial.truth:
        raise ConfigError(f"{min(given)} has no effect without truth=EPISODES")
    choice([0.0] * len(runs), 0.0, trial.k)  # ConfigError before the work begins
    episodes = _joined(demos)
    found = estimates(runs, episodes, config)
    behaviour = returns(episodes, config.gamma).mean().item()
    more = [word for word in args.words if word.partition("=")[0] in given]
    true = [
        played(run, more, args.config_dir, trial.truth, config.gamma)
        for run in (runs if trial.truth else ())
    ]
    _show(runs, found, behaviour, true, trial.k)


def _listed(own: dict[str, Any], name: str) -> list[str]:
    """The folders of NAME=A or NAME=[A,B]."""
    folders = [folder.strip() for folder in own[name].strip("[]").split(",")]
    if not all(folders):
        raise ConfigError(f"{name}={own[name]} names no folder")
    return folders


def played(path: str, words: list[str], folders: list[str], episodes: int, gamma: float) -> float:
    """The mean discounted return of a run's policy in `episodes` episodes of its environment, or
    the one that the words of a command line name."""
    subject = subject_of(path, words, folders)
    with closing(build(subject.env | {"num_envs": min(episodes, 16)}, VecEnv)) as env:
        policy = subject.make(env.spec).eval()
        made = islice(play(policy, env, FIRST, subject.execute), episodes)
        rewards = [episode["reward"].double() for episode, _ in made]
    return sum((r * gamma ** torch.arange(len(r))).sum().item() for r in rewards) / episodes


def _show(
    runs: Sequence[str],
    found: Sequence[Estimates],
    behaviour: float,
    true: Sequence[float],
    k: int,
) -> None:
    """Print the estimates, and which `k` policies each estimator would try; with `true` values,
    how good these choices are."""
    values = [f"{value:.3f}" for value in true] or [""] * len(runs)
    rows = [
        (run, f"{e.fqe:.3f}", f"{e.pdis:.3f}", f"{e.dr:.3f}", f"{e.effective:.1f}", value)
        for run, e, value in zip(runs, found, values, strict=True)
    ]
    rows.append(("the recordings", "", "", "", "", f"{behaviour:.3f}"))
    print_rows(("policy", "FQE", "PDIS", "DR", "effective episodes", "true"), rows)
    tries: list[tuple[str, ...]] = []
    for name in ("fqe", "pdis", "dr"):
        estimates = [float(getattr(each, name)) for each in found]
        named = [*(Path(run).name for run in runs), "the recordings"]
        tried = ", ".join(named[i] for i in choice(estimates, behaviour, k))
        numbers: tuple[float, ...] = ()
        if true:
            p = portfolio(estimates, true, behaviour, k)
            numbers = (p.sharpe, p.gain, p.std, p.best, p.worst, p.regret, p.unsafe)
            numbers = (*numbers, spearman(estimates, true))
        tries.append((name.upper(), tried, *(f"{number:.3g}" for number in numbers)))
    more = (f"SharpeRatio@{k}", "gain", "std", "best", "worst", "regret", "unsafe", "Spearman")
    print_rows(("estimator", f"the {k} to try", *(more if true else ())), tries)


def horizon(args: argparse.Namespace) -> None:
    allow_from(args.words)
    own = [word for word in args.words if word.startswith(("env.", "allow="))]
    chosen, given = chosen_part("env", args.names[0], args.config_dir)
    values = yaml_values([word for word in args.words if word not in own])
    config: GorpConfig = parse(GorpConfig, values, "embodied env horizon")
    words = [*chosen, *own, "learner=imitate"]  # a composition has one; it is not built
    node = compose("train", words, args.config_dir, given).node["env"]
    with closing(build({**node, "num_envs": config.num_envs}, VecEnv)) as env:
        gorp = Gorp(config, env)
        tried = [*gorp.attempts()]
    rows = [
        (str(a.depth), str(a.completions), f"{a.horizon:.2f}", f"{a.solved} of {config.tries}")
        for a in tried
    ]
    print_rows(("k", "m", "k + log_A m", "solved"), rows)
    print(gorp.meaning(tried))
