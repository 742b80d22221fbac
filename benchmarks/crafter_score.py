"""Crafter as a benchmark: its score and 22 success rates, of policies that are not trained too.

    python -m benchmarks.crafter_score demonstrator=NAME seed=1 out=DIR     one player's episodes
    python -m benchmarks.crafter_score work=outputs/evidence/crafter        the table of the study

The study is benchmarks/studies/crafter.yaml; its table is printed as Markdown, beside PUBLISHED.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.evidence import study_of
from embodied.commands import yaml_values
from embodied.compose import compose
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, build, parse
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.evaluation.evaluate import evaluate
from embodied.evaluation.statistics import iqm
from embodied.study.study import Study, is_done, last_value
from embodied.training.logger import read_metrics

# The scoreboards of github.com/danijar/crafter (README.md, 8e341bb): images, 1,000,000 steps, rates
# over all episodes of the training. Ours: symbols or words, the study's steps, rates of episodes
# that are played after them.
PUBLISHED = {
    "Random": "1.6 ± 0.0",
    "RND": "2.0 ± 0.1",
    "PPO": "4.6 ± 0.3",
    "DreamerV2": "10.0 ± 1.2",
    "DreamerV3": "14.5 ± 1.6",
    "PPO (ResNet)": "15.6 ± 1.6",
    "Curious Replay": "19.4 ± 1.6",
    "SPRING (GPT-4, no steps)": "27.3 ± 1.2",
    "Human (no steps)": "50.5 ± 6.8",
}
RATE = "eval/achievement/"


@dataclass(frozen=True)
class Config:
    demonstrator: str  # option of the group
    out: str  # folder of the result
    seed: CountOrZero = 0  # of the initial states
    episodes: Count = 50  # that are played
    num_envs: Count = 10  # parallel environments
    length: Count = 10_000  # time limit of an episode


def play(config: Config) -> None:
    """Play episodes, and write their score and rates as the evaluation of a run."""
    torch.manual_seed(config.seed)
    words = ["env=crafter", f"env.length={config.length}", f"out={config.out}"]
    node = compose("collect", [*words, f"demonstrator={config.demonstrator}"]).node
    with closing(build(node["env"] | {"num_envs": config.num_envs}, VecEnv)) as env:
        policy = build(node["demonstrator"], Policy, spec=env.spec)
        found = evaluate(policy, env, config.episodes, config.seed)
    metrics = {f"eval/{name}": value for name, value in found.metrics().items()}
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics}) + "\n")


def table(study: Study, work: Path) -> str:
    """The finished variants as Markdown: a column each, of the interquartile means over seeds."""
    done = [
        variant
        for variant in study.variants
        if all(is_done(work, variant, seed) for seed in study.seeds)
    ]
    if not done:
        raise ConfigError(f"{work} has no finished variant: python -m benchmarks.evidence crafter")
    first = read_metrics(work / f"{done[0]}-{study.seeds[0]}")[-1]
    rows = {"score (percent)": "eval/score"}
    rows |= {key.removeprefix(RATE): key for key in sorted(first) if key.startswith(RATE)}
    lines = [f"| {' | '.join(['', *done])} |", f"|{'---|' * (1 + len(done))}"]
    for name, key in rows.items():
        scale = 1.0 if key == "eval/score" else 100.0
        cells = [
            f"{scale * iqm([last_value(work / f'{variant}-{s}', key) for s in study.seeds]):.1f}"
            for variant in done
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    published = [f"| {name} | {score} |" for name, score in PUBLISHED.items()]
    return "\n".join([*lines, "", "| published | score (percent) |", "|---|---|", *published])


def main(words: list[str]) -> None:
    given = yaml_values(words)
    if "work" in given:
        print(table(study_of("crafter"), Path(str(given["work"]))))
    else:
        play(parse(Config, given, "crafter_score"))


if __name__ == "__main__":
    main(sys.argv[1:])
