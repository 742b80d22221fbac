"""The reports of a diagnosis (diagnosis.yaml, report.html with failures in pictures) and of an
improvement: who raced, how far each came, and the result on held-out states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
import yaml
from torch import Tensor

from embodied.core.build import Node, plain
from embodied.datasets.lerobot.video import encode_png
from embodied.evaluation.evaluate import Evaluation
from embodied.improvement.advice import NOTHING, Diagnosis, advise, measured
from embodied.improvement.diagnosis import Config, Findings
from embodied.improvement.race import BASE, SAMPLER, Improvement, Journal, amount
from embodied.reports.page import (
    Point,
    chart,
    data_url,
    figure,
    film_figure,
    head,
    table,
    write_page,
)


def write_diagnosis(
    folder: Path,
    policy: str,
    env: Node,
    config: Config,
    found: Findings,
    recordings: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write both files of the diagnosis of `policy` into `folder`; returns the page. `recordings`:
    what is said of those that it was trained with."""
    d = found.diagnosis
    facts = {
        "policy": policy,
        "env": env,
        "config": asdict(config),
        "diagnosis": asdict(d),
        "advice": [asdict(advice) for advice in advise(d)],
        "recordings": dict(recordings),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(plain(facts), sort_keys=False)
    (folder / "diagnosis.yaml").write_text(text)
    body = [
        head(f"Diagnosis of {policy}", f"{d.episodes} episodes, tuning seed {config.seed}"),
        "<h2>What may help</h2>",
        _ways(d),
        "<h2>Measured</h2>",
        table((), measured(d)),
        _elements(d),
        f"<h2>Recordings</h2>{table((), recordings)}" if recordings else "",
        "<h2>Episodes</h2>",
        f'<div class="grid2">{"".join(_charts(found))}</div>',
        _pictures(found),
        f"<h2>Environment</h2><pre>{escape(yaml.safe_dump(env, sort_keys=False))}</pre>",
    ]
    return write_page(folder / "report.html", f"Diagnosis of {policy}", body)


def _ways(d: Diagnosis) -> str:
    rows = [(each.way, f"+{each.gain:.0%}", each.reason) for each in advise(d)]
    return table(("way", "may add", "why"), rows) if rows else f"<p>{NOTHING}</p>"


def _elements(d: Diagnosis) -> str:
    """How far each element of the action differs."""
    rows = [(name, f"{a:.0%}", f"{b:.0%}") for name, (a, b) in d.elements.items()]
    heads = "element of the action", "spread over noise", "over observations, of half its range"
    return f"<h2>Actions</h2>{table(heads, rows)}"


def _charts(found: Findings) -> Iterator[str]:
    d, episodes = found.diagnosis, found.episodes
    score = "success over noise" if d.base.is_rate else "return over noise"
    ordered = found.mean.sort().values.tolist()
    points = [(100 * (i + 1) / len(ordered), value) for i, value in enumerate(ordered)]
    limits = (0.0, 1.0) if d.base.is_rate else (None, None)
    drawn = chart({score: points}, score, limits=limits, legend=False)
    said = f"never {d.never:.0%}, always {d.always:.0%}"
    yield figure(drawn, f"{score}, by percent of the initial states", said)
    if ends := _ends(episodes):
        drawn = chart(ends, "failures", limits=(0.0, 1.0))
        yield figure(drawn, "share of episodes that have failed by a step")


def _ends(episodes: Evaluation) -> dict[str, list[tuple[float, float]]]:
    """The share of episodes that failed by each step, and in which way."""
    if episodes.success is None or episodes.timed_out is None:
        return {}
    failed = ~episodes.success
    kinds = {"out of time": failed & episodes.timed_out, "ended": failed & ~episodes.timed_out}
    return {name: _risen(episodes.lengths, some) for name, some in kinds.items() if some.any()}


def _risen(lengths: Tensor, some: Tensor) -> list[tuple[float, float]]:
    """The share of episodes [N] that are of `some` [N] and at most as long as each of steps."""
    most = int(lengths.max())
    steps = torch.linspace(0, most, min(most, 100) + 1).round()
    return [(t, ((lengths <= t) & some).float().mean().item()) for t in steps.tolist()]


def _pictures(found: Findings) -> str:
    """First and last frames of failures."""
    if not found.pictures:
        return ""
    drawn = [
        figure(
            f'<img alt="{escape(name)}" src="{data_url("image/png", encode_png(frames))}">', name
        )
        for name, frames in found.pictures.items()
    ]
    return f'<h2>Failures: first and last frame</h2><div class="grid2">{"".join(drawn)}</div>'


def write_report(
    result: Improvement, journal: Journal, base: str, unit: str, videos: Mapping[str, Path]
) -> Path:
    """Write OUT/report.html about the improvement of the policy `base`, with budgets in `unit`;
    `videos` are of ways from the same initial state."""
    rows = [_row(name, result, journal) for name in result.rows]
    spent = f"{unit} of training", "minutes in all"
    heads = ("", *spent, "while choosing", "held out", "acts with")
    drawn = [figure(curves(journal, "budget"), f"by {spent[0]}")]
    drawn += [figure(curves(journal, "minutes"), "by minutes, with all measurements")]
    parts = [
        head("Improvement", str(result), f"base: {base}"),
        f"<h2>Result</h2>{table(heads, rows)}",
        "<p>While choosing: the episodes by which the race was decided, from initial states of "
        "their own. Held out: episodes from others, played once at the end; the "
        "difference between both columns is luck that chose.</p>",
        f'<h2>Race</h2><div class="grid2">{"".join(drawn)}</div>',
    ]
    if videos:
        films = "".join(film_figure(path, name) for name, path in videos.items())
        parts.append(f"<h2>From the same initial state</h2>{films}")
    if result.problems:
        shown = table(("way", "why it was not in the race"), result.problems.items())
        parts.append(f"<h2>Left out</h2>{shown}")
    lines = f"embodied view {result.policy}\nembodied eval {result.policy} episodes=500"
    parts.append(f"<h2>Next</h2><pre>{escape(lines)}</pre>")
    return write_page(result.report, "Improvement", parts)


def _row(name: str, result: Improvement, journal: Journal) -> Sequence[str]:
    legs = journal.of(name)
    last = result.chosen if name == result.chosen.way else legs[-1]
    until = [leg for leg in legs if leg.rung <= last.rung]
    mark = " (chosen)" if name == result.chosen.way else ""
    minutes = sum(leg.minutes for leg in until)
    budget = sum(leg.budget for leg in until)
    spent = "-" if name in (BASE, SAMPLER) else amount(budget)
    return (
        name + mark,
        spent,
        f"{minutes:.1f}",
        str(last.score),
        str(result.rows[name]),
        " ".join(last.sampler),
    )


def curves(journal: Journal, along: str) -> str:
    """The scores of all ways over what they have spent, with intervals."""
    series, bands = dict[str, list[Point]](), dict[str, list[Point]]()
    for way in dict.fromkeys(leg.way for leg in journal.legs if leg.score is not None):
        points, spans, spent = list[Point](), list[Point](), 0.0
        for leg in journal.of(way):
            spent += 0.0 if leg.way == BASE else getattr(leg, along)
            if leg.score is not None:
                points.append((spent, leg.score.mean))
                spans.append((leg.score.low, leg.score.high))
        series[way], bands[way] = points, spans
    rates = all(leg.score.is_rate for leg in journal.legs if leg.score is not None)
    limits = (0.0, 1.0) if rates else (None, None)
    return chart(series, "score", bands, limits=limits)
