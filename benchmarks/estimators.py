"""Off-policy estimators, judged by the policies that each would try on a robot: SharpeRatio@k.

    python -m benchmarks.estimators policies=RUN/checkpoints demos=DIR seed=0 out=DIR
    python -m benchmarks.estimators judged=DIR by=fqe out=DIR

The first estimates what the policies are worth and plays them. The second writes, as the metrics of
a run, how good the choice by one estimator is; `by=chance` the mean of 1,000 random orders.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from embodied.buffers.weighted import returns
from embodied.commands.measure import played
from embodied.datasets.lerobot.reader import read_episodes
from embodied.evaluation.off_policy import Config, estimates, portfolio
from embodied.nn.statistics import spearman

K = 3  # policies that are tried
EPISODES = 50  # for a policy's true value
UPDATES = 3000  # of each value function


def judge(policies: Path, demos: Path, seed: int, out: Path) -> None:
    """Write the estimates and true values of all checkpoints, and the value of the recordings."""
    runs = sorted(map(str, policies.iterdir()))
    config = Config(seed=seed, updates=UPDATES)
    episodes = read_episodes(demos)
    found = estimates(runs, episodes, config)
    facts = {
        "behaviour": returns(episodes, config.gamma).mean().item(),
        "true": [played(run, [], [], EPISODES, config.gamma) for run in runs],
        **{name: [getattr(each, name) for each in found] for name in ("fqe", "pdis", "dr")},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "estimates.json").write_text(json.dumps(facts, indent=1))


def choices(facts: dict[str, Any], by: str) -> dict[str, float]:
    """Metrics of the choice of `K` policies."""
    true, behaviour = facts["true"], facts["behaviour"]
    if by != "chance":
        return metrics(facts[by], true, behaviour)
    random = np.random.default_rng(0)
    found = [
        metrics(behaviour + random.normal(size=len(true)), true, behaviour) for _ in range(1000)
    ]
    return {name: fmean(each[name] for each in found) for name in found[0]}


def metrics(values: Any, true: list[float], behaviour: float) -> dict[str, float]:
    p = portfolio([*map(float, values)], true, behaviour, K)
    sharpe = p.sharpe if math.isfinite(p.sharpe) else 0.0
    rank = spearman([*map(float, values)], true)
    return {"best": p.best, "sharpe": sharpe, "unsafe": p.unsafe, "spearman": rank}


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    out = Path(given["out"])
    if "policies" in given:
        judge(Path(given["policies"]), Path(given["demos"]), int(given["seed"]), out)
        return
    facts = json.loads((Path(given["judged"]) / "estimates.json").read_text())
    found = {f"eval/{name}": value for name, value in choices(facts, given["by"]).items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text(json.dumps({"step": 0, **found}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
