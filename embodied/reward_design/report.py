"""Report of a reward design: settings, the best program, fitness by round, every candidate."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from embodied.reports.page import chart
from embodied.reward_design.journal import Candidate, Journal
from embodied.reward_design.prompts import curves, line

STYLE = (
    "<style>text{font:11px sans-serif;fill:#666}.grid{stroke:#ddd;fill:none}"
    ".line{stroke:#2a6fdb;fill:none;stroke-width:2}.dot{fill:#2a6fdb}.y{text-anchor:end}"
    ".x{text-anchor:middle}</style>"
)


def write(ledger: Journal, settings: dict[str, Any]) -> Path:
    """Write `report.md` and `fitness.svg` to the journal's folder."""
    folder = ledger.folder
    best = ledger.best
    lines = [f"# Reward design: {settings['sentence']}", ""]
    lines += [f"- environment: {settings['world']}", f"- designer: {settings['designer']}"]
    lines += [f"- model: {settings['model']}", f"- sandbox: {settings['sandbox']}"]
    lines += [f"- measure: {settings['measure']}, measured by the environment, not by a program"]
    lines += [f"- cost: {cost(ledger)}", ""]
    lines += _best(best, ledger) if best is not None else ["No valid program.", ""]
    picture = plot(ledger)
    if picture:
        (folder / "fitness.svg").write_text(picture)
        lines += ["![best score after each round](fitness.svg)", ""]
    lines += ["| id | round | best score | AUC | problem | program |", "|---|---|---|---|---|---|"]
    lines += [row_of(c) for c in ledger.candidates.values()]
    file = folder / "report.md"
    file.write_text("\n".join([*lines, ""]))
    return file


def cost(ledger: Journal) -> str:
    """Numbers of programs, trainings, environment steps and tokens."""
    all_ = list(ledger.candidates.values())
    trained = [c for c in all_ if c.scores]
    steps = sum(c.scores[-1][0] for c in trained)
    tokens = sum(int(c.origin.get("tokens", 0)) for c in all_)
    words = f", {tokens:,} tokens" if tokens else ""
    return f"{len(all_)} programs, {len(trained)} trained, {steps:,} steps{words}"


def plot(ledger: Journal) -> str:
    """The best score so far by round, as SVG."""
    points: list[tuple[float, float]] = []
    for number in sorted({c.round for c in ledger.candidates.values()}):
        values = [c.fitness for c in ledger.of_round(number) if c.fitness is not None]
        best = max([*values, *(y for _, y in points)], default=None)
        if best is not None:
            points.append((float(number + 1), float(best)))
    title = "best score after each round"
    drawn = chart({title: points}, title, legend=False)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f">{STYLE}", 1
    )


def _best(best: Candidate, ledger: Journal) -> list[str]:
    scores = list(ledger.finals.values())
    lines = [f"## The best program ({best.id}, round {best.round + 1})", ""]
    lines += [f"Selected for {best.fitness:.3g}, the maximum of many: biased upwards."]
    if scores:
        each = ", ".join(f"{s:.3g}" for s in scores)
        lines += [f"Retrained with fresh seeds: {sum(scores) / len(scores):.3g} ({each})."]
    lines += ["", "```python", (best.source or "").rstrip(), "```", ""]
    lines += [f"- {line(name, values)}" for name, values in curves(best).items()]
    return [*lines, ""]


def row_of(c: Candidate) -> str:
    """The table row of a candidate, with the last reason for which the model had to repair it."""
    fitness = "" if c.fitness is None else f"{c.fitness:.3g}"
    auc = c.report.get("auc")
    repaired = "".join(f"repaired: {reason}" for reason in c.returned[-1:])
    problem = html.escape((c.problem or repaired)[:120]).replace("|", "/")
    link = f"[{c.digest[:8]}](candidates/{c.id:03d}/reward.py)" if c.source else ""
    cells = [str(c.id), str(c.round + 1), fitness, "" if auc is None else f"{auc:.2f}", problem]
    return "| " + " | ".join([*cells, link]) + " |"
