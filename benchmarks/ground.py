"""What `embodied improve` chose, beside every way alone, on tasks that its recipes do not know.

    python -m benchmarks.ground [STUDY ...] [--work DIR]      (default: all ground_*.yaml)

Runs nothing: `python -m benchmarks.evidence STUDY` does. Prints a table of the seeds that are
finished, and how far what improve left behind is from the best way with the whole budget.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.command import put_root_on_path
from benchmarks.evidence import STUDIES, finished, scores_of, study_of, summarize
from benchmarks.rules import seeds_alone
from embodied.compose import PACKAGED, options
from embodied.evaluation.statistics import bootstrap_interval, iqm
from embodied.study.study import Study, seconds_of

NEAR = 0.03  # of the best way: as good as that


def main() -> None:
    put_root_on_path()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="*")
    parser.add_argument("--work", type=Path, default=Path("outputs/evidence"))
    args = parser.parse_args()
    for name in args.studies or sorted(file.stem for file in STUDIES.glob("ground_*.yaml")):
        study = study_of(name)
        seeds = finished(study, args.work / name)
        print(f"\n{study.task}: {len(seeds)} of {len(study.seeds)} seeds")
        if seeds:
            print("\n".join(lines(study, seeds, args.work / name)))


def lines(study: Study, seeds: tuple[int, ...], work: Path) -> list[str]:
    """The table of a study's `seeds`, and the distance of its result from the best way."""
    found = scores_of(replace(study, seeds=seeds), work, study.metric)
    scores = {variant: np.asarray(values) for variant, values in found.items()}
    alone = bool(seeds_alone(study, seeds))
    rows = ["| | success | 95% | min |", "|---|---|---|---|"]
    for variant, values in scores.items():
        low, high = bootstrap_interval(values)
        minutes = np.median([seconds_of(work / f"{variant}-{seed}") for seed in seeds]) / 60
        interval = "" if alone else f"{low:.1%} to {high:.1%}"
        rows.append(f"| {variant} | {summarize(values, alone)} | {interval} | {minutes:.1f} |")
    ways = [variant for variant in scores if variant in options("way", [PACKAGED])]
    best = max(ways, key=lambda way: iqm(scores[way]))
    away = iqm(scores[study.result]) - iqm(scores[best])
    within = "within" if away >= -NEAR else "not within"
    return [*rows, f"\n{study.result}: {100 * away:+.1f} points from {best}, {within} {NEAR:.0%}"]


if __name__ == "__main__":
    main()
