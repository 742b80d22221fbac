"""The report of a diagnosis: diagnosis.yaml, and report.html with failures in pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from embodied.reports.page import chart, data_url, figure, head, table, write_page


def write(
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
