"""Fine-tuning methods from one BC policy on one task: success by steps and time, plot and table.

The study `finetuners_insert`: all start from the BC policy of their seed and are evaluated on the
same held-out initial states. Interquartile means with bootstrap intervals (Agarwal et al., 2021).
Finished runs are not repeated, so an interrupted bench continues.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.command import main
from benchmarks.curves import Curve, read
from benchmarks.evidence import study_of
from benchmarks.measure import machine
from benchmarks.rules import env_steps
from embodied.core.build import ConfigError
from embodied.evaluation.statistics import bootstrap_interval, iqm
from embodied.study.study import Study, cores
from embodied.study.study import run as run_study

GOOD = 0.9  # success rate whose first crossing is in the table
# Colour-blind safe (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLOURS += ("#8C6D1F", "#882255")


def run(out: Path) -> None:
    """Run what is missing, then write OUT/finetune.{json,png} and print the table."""
    study = study_of("finetuners_insert")
    work = out / "finetune"
    run_study(study, work, cores())
    report(study, work, out)


def report(study: Study, work: Path, out: Path) -> None:
    """Write the report from the variants below `work` that are finished for every seed: the
    baseline, and those that act."""
    curves = {
        variant: curve
        for variant in study.variants
        if (variant == study.baseline or env_steps(study, variant))
        and (curve := read(study, work, variant)) is not None
    }
    if study.baseline not in curves:
        raise ConfigError(f"no seed of the {study.baseline} has finished below {work}")
    base = curves.pop(study.baseline).scores[:, -1]
    facts: dict[str, Any] = {
        "task": study.task,
        "machine": machine(),
        study.baseline: base.tolist(),
        "variants": {
            variant: {
                "steps": curve.steps.tolist(),
                "seconds": curve.seconds.tolist(),
                "scores": curve.scores.tolist(),
            }
            for variant, curve in curves.items()
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "finetune.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(study, base, curves, out / "finetune.png")
    Console().print(table(study, base, curves))
    Console().print(f"curves: {out / 'finetune.png'}", markup=False)


def draw(study: Study, base: NDArray[np.float64], curves: dict[str, Curve], file: Path) -> None:
    """Success by steps (left) and by minutes (right), from the BC policy's at 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    start, spread = iqm(base), bootstrap_interval(base)
    for axis, label in zip(axes, ("environment steps", "minutes on one core"), strict=True):
        axis.axhline(start, color="grey", linestyle="--", linewidth=1, label=study.baseline)
        for colour, (variant, curve) in zip(cycle(COLOURS), curves.items(), strict=False):
            x = curve.steps if label == "environment steps" else curve.seconds / 60
            middle, band = curve.middle, curve.band
            if "init=" in study.variants[variant]:  # it starts from the BC policy
                x, middle = np.append(0.0, x), np.append(start, middle)
                band = np.vstack([[spread], band])
            axis.plot(x, middle, color=colour, marker="o", markersize=3, label=variant)
            axis.fill_between(x, band[:, 0], band[:, 1], color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel=label, ylim=(-0.02, 1.02))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("success (interquartile mean, 95%)")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.suptitle(study.task, fontsize=11)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def table(study: Study, base: NDArray[np.float64], curves: dict[str, Curve]) -> Table:
    """One line per variant: final success, steps and minutes to `GOOD`."""
    low, high = bootstrap_interval(base)
    title = f"{study.task}; {study.baseline}: {iqm(base):.2f} [{low:.2f}, {high:.2f}]"
    shown = Table(title=title)
    for head in ("variant", "success [95%]", f"steps to {GOOD:.0%}", "minutes to it", "minutes"):
        shown.add_column(head)
    for variant, curve in curves.items():
        low, high = curve.band[-1]
        there = (curve.middle >= GOOD).nonzero()[0]
        reached = (
            (f"{curve.steps[there[0]]:,.0f}", f"{curve.seconds[there[0]] / 60:.1f}")
            if len(there)
            else ("-", "-")
        )
        final = f"{curve.middle[-1]:.2f} [{low:.2f}, {high:.2f}]"
        shown.add_row(variant, final, *reached, f"{curve.seconds[-1] / 60:.1f}")
    return shown


if __name__ == "__main__":
    main(run)
