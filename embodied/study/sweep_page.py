"""The page of a sweep: its best trial, every trial, and the result over each setting."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import write_json
from embodied.reports.svg import several
from embodied.study.page import figure, head, number, table, write_page
from embodied.study.study import values_of
from embodied.study.sweep import Sweep, folder_of, trial_words


def facts(study: Any, out: Path) -> list[dict[str, Any]]:
    """Every trial: number, settings, state, result and the values at its checkpoints."""
    return [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value,
            "settings": trial.params,
            "checkpoints": trial.intermediate_values,
            "run": str(folder_of(out, trial.number)),
        }
        for trial in study.trials
    ]


def best_of(sweep: Sweep, trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The complete trial with the best result."""
    complete = [trial for trial in trials if trial["state"] == "complete"]
    sign = 1 if sweep.direction == "maximize" else -1
    return max(complete, key=lambda trial: sign * trial["value"], default=None)


def write_sweep(name: str, sweep: Sweep, study: Any, out: Path) -> Path:
    """Write results.json and report.html into `out`; returns the page."""
    trials = facts(study, out)
    best = best_of(sweep, trials)
    write_json(out / "results.json", {"metric": sweep.metric, "best": best, "trials": trials})
    keys = [each.key for each in sweep.space]
    rows = [
        [
            str(t["trial"]),
            t["state"],
            "-" if t["value"] is None else number(t["value"]),
            *(_shown(t["settings"].get(key)) for key in keys),
            t["run"],
        ]
        for t in sorted(trials, key=lambda t: t is not best)
    ]
    body = [
        head(name, f"{len(trials)} trials, {sweep.direction} {sweep.metric}"),
        _best(sweep, best),
        "<h2>Trials</h2>",
        table(("trial", "state", sweep.metric, *keys, "run"), rows),
        "<h2>During training</h2>",
        figure(
            several({str(t["trial"]): _curve(sweep, Path(t["run"])) for t in trials}, sweep.metric)
        ),
        *(_over(sweep, key, trials) for key in keys),
    ]
    return write_page(out, name, body)


def _curve(sweep: Sweep, folder: Path) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in values_of(folder, sweep.metric)]


def _best(sweep: Sweep, best: dict[str, Any] | None) -> str:
    if best is None:
        return "<p>no trial is complete yet</p>"
    line = shlex.join(["embodied", "train", *trial_words(sweep, best["settings"])])
    says = f"The best of many trials is too good by chance: repeat it with other seeds.\n{line}"
    return f"<h2>Best: trial {best['trial']}, {number(best['value'])}</h2><pre>{escape(says)}</pre>"


def _over(sweep: Sweep, key: str, trials: list[dict[str, Any]]) -> str:
    """The results over one setting; of choices a table."""
    done = [t for t in trials if t["value"] is not None and key in t["settings"]]
    if any(isinstance(t["settings"][key], str) for t in done):
        values: dict[str, list[float]] = {}
        for t in done:
            values.setdefault(t["settings"][key], []).append(t["value"])
        rows = [[c, str(len(v)), number(max(v)), number(min(v))] for c, v in values.items()]
        drawn = table((key, "trials", "highest", "lowest"), rows)
    else:
        points = sorted((float(t["settings"][key]), float(t["value"])) for t in done)
        drawn = figure(several({sweep.metric: points}, key))
    return f"<h2>{escape(key)}</h2>{drawn}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
