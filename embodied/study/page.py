"""One HTML page, and results.json, of a study or a sweep."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.atomic_write import write_json
from embodied.evaluation.statistics import (
    bootstrap_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
)
from embodied.reports.page import (
    LEFT,
    RIGHT,
    WIDTH,
    chart,
    columns,
    figure,
    head,
    table,
    ticks,
    write_page,
)
from embodied.study.study import Study, is_done, last_value, seconds_of, values_of
from embodied.study.sweep import Sweep, folder_of, trial_words

ROW = 30  # pixels of one variant in the plot of intervals


def results(study: Study, work: Path) -> dict[str, Any]:
    """Scores of the finished runs of every variant, with what is said about them."""
    variants = {}
    for name in study.variants:
        seeds = [seed for seed in study.seeds if is_done(work, name, seed)]
        outs = [work / f"{name}-{seed}" for seed in seeds]
        scores = [last_value(out, study.metric) for out in outs]
        variants[name] = {
            "line": study.line(name, study.seeds[0], work),
            "seeds": seeds,
            "scores": scores,
            "minutes": [seconds_of(out) / 60 for out in outs],
            **summary(scores),
        }
    sign = 1 if study.direction == "maximize" else -1
    base = sign * np.array(variants[study.baseline]["scores"])
    for name, facts in variants.items():
        if name != study.baseline and len(base) and facts["scores"]:
            compared = probability_of_improvement(sign * np.array(facts["scores"]), base)
            facts["probability_of_improvement"] = list(compared)
    return {"metric": study.metric, "baseline": study.baseline, "variants": variants}


def summary(scores: Sequence[float]) -> dict[str, Any]:
    """Interquartile mean and its 95% bootstrap interval; nothing without scores."""
    if not scores:
        return {}
    return {"iqm": iqm(scores), "interval": list(bootstrap_interval(scores))}


def write_study(name: str, study: Study, work: Path) -> Path:
    """Write results.json and report.html into `work`; returns the page."""
    found = results(study, work)
    write_json(work / "results.json", found)
    tasks = study.tasks(study.seeds[0], work)
    lines = [line for task in tasks for line in task.lines.values()]  # of the first seed
    lines += [facts["line"] for facts in found["variants"].values()]
    # The IQM of each variant at every evaluated step that all its runs have.
    curves: dict[str, list[tuple[float, float]]] = {}
    for variant in study.variants:
        runs = [dict(values_of(work / f"{variant}-{s}", study.metric)) for s in study.seeds]
        runs = [run for run in runs if run]
        steps = sorted(set.intersection(*map(set, runs))) if runs else []
        curves[variant] = [(float(step), iqm([run[step] for run in runs])) for step in steps]
    body = [
        head(study.method or name, study.task, study.claim),
        f"<h2>{escape(study.metric)} at the end</h2>",
        figure(intervals(found["variants"])),
        table(HEADS, [_cells(n, f, study.baseline) for n, f in found["variants"].items()]),
        NOTE,
        "<h2>Share of runs above a score</h2>",
        figure(chart(profiles(found["variants"]), "share of runs")),
        "<h2>During training</h2>",
        figure(chart(curves, study.metric)),
        "<h2>Command lines</h2>",
        f"<pre>{escape(chr(10).join(lines))}</pre>",
        *_choices(study, work),
    ]
    return write_page(work / "report.html", name, body)


def _choices(study: Study, work: Path) -> list[str]:
    files = {
        (seed, task.out.name): Path(f"{task.out}.choice.json")
        for seed in study.seeds
        for task in study.tasks(seed, work)
        if task.best
    }
    made = {at: json.loads(file.read_text()) for at, file in files.items() if file.exists()}
    if not made:
        return []
    rows = [
        (
            name,
            str(seed),
            each["chosen"],
            each["best"],
            ", ".join(f"{choice} {number(score)}" for choice, score in each["scores"].items()),
        )
        for (seed, name), each in made.items()
    ]
    return ["<h2>Choices</h2>", table(("stage", "seed", "chosen", "metric", "scores"), rows)]


HEADS = ("variant", "runs", "IQM", "95% interval", "P(better than baseline)", "scores", "minutes")
NOTE = (
    "<p>IQM: interquartile mean over seeds, with its 95% bootstrap interval. P: probability that a "
    "run of the variant is better than one of the baseline, with its 95% interval; near 50% "
    "means that they cannot be told apart. With fewer than five seeds intervals are too narrow."
    "</p>"
)


def profiles(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The performance profile of each variant's runs, over the range of all scores."""
    every = [score for facts in variants.values() for score in facts["scores"]]
    if not every:
        return {}
    at = np.linspace(min(every), max(every), 101)
    return {
        name: list(zip(at.tolist(), performance_profile(facts["scores"], at).tolist(), strict=True))
        for name, facts in variants.items()
        if facts["scores"]
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cells(name: str, facts: Mapping[str, Any], baseline: str) -> list[str]:
    if not facts["scores"]:
        return [name, "0", "-", "-", "-", "", ""]
    low, high = facts["interval"]
    compared = facts.get("probability_of_improvement")
    better = (
        "-" if compared is None else f"{compared[0]:.0%} [{compared[1]:.0%}, {compared[2]:.0%}]"
    )
    return [
        f"{name} (baseline)" if name == baseline else name,
        str(len(facts["scores"])),
        number(facts["iqm"]),
        f"[{number(low)}, {number(high)}]",
        better,
        ", ".join(map(number, facts["scores"])),
        f"{float(np.median(facts['minutes'])):.1f}",
    ]


def intervals(variants: Mapping[str, Mapping[str, Any]]) -> str:
    """An SVG: one line per variant with the score of every run and, where it has one, its interval
    and its IQM."""
    drawn = {name: facts for name, facts in variants.items() if facts["scores"] or "iqm" in facts}
    if not drawn:
        return ""
    every = [v for f in drawn.values() for v in (*f["scores"], *f.get("interval", ()))]
    low, high = min(every), max(every)
    pad = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    low, high, left = low - pad, high + pad, LEFT + 60

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - RIGHT - left)

    height = ROW * len(drawn) + 24
    parts = [
        f'<text x="{x(v):.1f}" y="{height - 6}" class="x">{number(v)}</text>'
        f'<path class="grid" d="M{x(v):.1f} 0V{height - 20}"/>'
        for v in ticks(low, high, 5)
    ]
    for at, (name, facts) in enumerate(drawn.items()):
        y = ROW * at + ROW / 2
        parts.append(f'<text x="{left - 8}" y="{y + 4}" class="y">{escape(name[:22])}</text>')
        parts += [
            f'<circle cx="{x(v):.1f}" cy="{y}" r="2.5" class="dot" opacity=".5"/>'
            for v in facts["scores"]
        ]
        if "iqm" in facts:
            a, b = facts["interval"]
            parts.append(f'<path class="whisker" d="M{x(a):.1f} {y}H{x(b):.1f}"/>')
            parts.append(f'<circle cx="{x(facts["iqm"]):.1f}" cy="{y}" r="5" class="dot"/>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def lines(found: Mapping[str, Any]) -> str:
    rows = [_cells(n, f, found["baseline"])[:5] for n, f in found["variants"].items()]
    return "\n".join(columns([HEADS[:5], *rows]))


def facts(study: Any, out: Path) -> list[dict[str, Any]]:
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
    complete = [trial for trial in trials if trial["state"] == "complete"]
    sign = 1 if sweep.direction == "maximize" else -1
    return max(complete, key=lambda trial: sign * trial["value"], default=None)


def write_sweep(name: str, sweep: Sweep, study: Any, out: Path) -> Path:
    """Write results.json and report.html into `out`; returns the page."""
    trials = facts(study, out)
    best = best_of(sweep, trials)
    write_json(out / "results.json", {"metric": sweep.metric, "best": best, "trials": trials})
    keys = [each.key for each in sweep.space]
    curves = {str(t["trial"]): values_of(Path(t["run"]), sweep.metric) for t in trials}
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
    winner = "<p>no trial is complete yet</p>"
    if best is not None:
        line = shlex.join(["embodied", "train", *trial_words(sweep, best["settings"])])
        says = f"The best of many trials is too good by chance: repeat it with other seeds.\n{line}"
        title = f"Best: trial {best['trial']}, {number(best['value'])}"
        winner = f"<h2>{title}</h2><pre>{escape(says)}</pre>"
    body = [
        head(name, f"{len(trials)} trials, {sweep.direction} {sweep.metric}"),
        winner,
        "<h2>Trials</h2>",
        table(("trial", "state", sweep.metric, *keys, "run"), rows),
        "<h2>During training</h2>",
        figure(chart(curves, sweep.metric)),
        *(_over(sweep, key, trials) for key in keys),
    ]
    return write_page(out / "report.html", name, body)


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
        drawn = figure(chart({sweep.metric: points}, key))
    return f"<h2>{escape(key)}</h2>{drawn}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
