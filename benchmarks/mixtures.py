"""Do TQ and SACo of recordings say whether offline RL is ahead of cloning of them?

    python -m benchmarks.mixtures parts=DIR,DIR,... seed=0 out=DIR
    python -m benchmarks.mixtures mixtures=DIR by=saco out=DIR

The first trains IQL and BC on each part and on each pair of them. The second writes, as the metric
of a run, the rank correlation of a number with what IQL is ahead.
"""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np

import embodied as em
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.transitions import joined
from embodied.nn.statistics import spearman
from embodied.reports.quality import Config, quality

UPDATES = 3000  # of each learner


def measure(parts: list[Path], seed: int, out: Path) -> None:
    """Write the numbers of all parts and pairs, and the returns of what was trained on them."""
    mixtures = [*combinations(parts, 1), *combinations(parts, 2)]
    whole = joined([read_episodes(part) for part in parts])
    rows: list[dict[str, float]] = []
    for number, mixture in enumerate(mixtures):
        found = quality(joined([read_episodes(part) for part in mixture]), Config(), whole)
        scores = {
            name: trained(name, mixture, seed, out / f"{name}-{number}") for name in ("iql", "bc")
        }
        rows.append(
            {
                "mean": found.mean,
                "saco": found.saco,
                "variance": found.positive_variance,
                "steps": found.steps,
                "ahead": scores["iql"] - scores["bc"],
            }
        )
        out.mkdir(parents=True, exist_ok=True)
        (out / "mixtures.json").write_text(json.dumps(rows, indent=1))


def trained(name: str, mixture: tuple[Path, ...], seed: int, out: Path) -> float:
    """Mean return of 50 episodes after training on a mixture."""
    agent = em.train(
        f"experiment=pendulum_{name}",
        demos=[str(part) for part in mixture],
        steps=UPDATES,
        eval_every=0,
        seed=seed,
        out=str(out),
        video=False,
        verbose=False,
    )
    assert agent.folder is not None
    last = (agent.folder / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["eval/return"])


def correlation(rows: list[dict[str, float]], by: str) -> float:
    """Of the number `by` with what IQL is ahead; `chance`: the mean of 1,000 random orders."""
    ahead = [row["ahead"] for row in rows]
    if by != "chance":
        return spearman([row[by] for row in rows], ahead)
    random = np.random.default_rng(0)
    return float(np.mean([spearman([*random.random(len(rows))], ahead) for _ in range(1000)]))


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    out = Path(given["out"])
    if "parts" in given:
        parts = [Path(part) for part in given["parts"].split(",")]
        measure(parts, int(given["seed"]), out)
        return
    rows = json.loads((Path(given["mixtures"]) / "mixtures.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    metric = {"step": 0, "eval/correlation": correlation(rows, given["by"])}
    (out / "metrics.jsonl").write_text(json.dumps(metric) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
