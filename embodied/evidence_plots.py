"""Plots of the evidence: `docs/results.md`, and one SVG or two for each study in `docs/evidence/`.

Only of studies whose results were not withdrawn and from whose seeds one may conclude.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.evaluation.statistics import iqm
from embodied.reports.svg import COLOURS, several
from embodied.study.page import intervals, summary

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results.md"
HEAD = """# Results

One plot for each study of the [evidence](evidence.md) that obeys the
[rules](studies.md#rules-of-evidence) and has five seeds or more: small dots are runs, the large one
is their interquartile mean, the bar its 95% bootstrap interval. Where runs were evaluated several
times, a second plot shows the interquartile mean during training. What a study shows, and its
limits, is below its plot. Other studies, and all numbers, are in the evidence. `make evidence`
writes this page.
"""
# An image in a page of Markdown has no style but its own, and does not know the reader's colours.
INKS = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490")
STYLE = """<style>
svg { background: #fff; }
text { font: 11px sans-serif; fill: #68727e; }
.y { text-anchor: end; } .x { text-anchor: middle; }
.grid { stroke: #e1e5ea; } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dot { fill: #0b6bcb; } .whisker { stroke: #0b6bcb; stroke-width: 5; opacity: .25; }
</style>"""


def write_plots(studies: Mapping[str, dict[str, Any]]) -> None:
    """Write docs/results.md and its images; `studies`: what is known of each, by name."""
    folder = PAGE.with_name("evidence")
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, facts in shown(studies).items():
        for file, drawn in pictures(name, facts).items():
            (folder / file).write_text(alone(drawn))
    PAGE.write_text(page(studies))


def page(studies: Mapping[str, dict[str, Any]]) -> str:
    return "\n".join([HEAD, *(section(name, facts) for name, facts in shown(studies).items())])


def shown(studies: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: facts
        for name, facts in studies.items()
        if not facts["withdrawn"] and not facts["seeds_alone"]
    }


def section(name: str, facts: Mapping[str, Any]) -> str:
    """A study's part of the page."""
    images = [f"![{file}](evidence/{file})" for file in pictures(name, facts)]
    about = f"{facts['task']}. `{facts['metric']}`, {len(facts['seeds'])} seeds."
    return "\n".join(
        [f"## {facts['method']}", "", about, "", *images, "", facts["claim"].strip(), ""]
    )


def pictures(name: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """A study's SVGs by file name."""
    both = {f"{name}.svg": intervals(scores(facts)), f"{name}_training.svg": lines(facts)}
    return {file: drawn for file, drawn in both.items() if drawn}


def scores(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"scores": each, **summary(each)} for name, each in facts["scores"].items()}


def lines(facts: Mapping[str, Any]) -> str:
    """An SVG of the interquartile mean of every variant over its steps; "" without curves."""
    curves = {
        name: [
            (step, iqm(column))
            for step, column in zip(each["steps"], zip(*each["scores"], strict=True), strict=True)
        ]
        for name, each in facts.get("curves", {}).items()
    }
    drawn = several(curves, facts["metric"]).partition("</svg>")[0]
    return drawn and drawn + names(curves) + "</svg>"


def names(curves: Mapping[str, Any]) -> str:
    """The legend, beside the curves."""
    return "".join(
        f'<text x="70" y="{22 + 14 * k}" style="fill:{INKS[k % len(INKS)]}">{name}</text>'
        for k, name in enumerate(curves)
    )


def alone(drawn: str) -> str:
    """An SVG that needs no page around it."""
    for colour, ink in zip(COLOURS, INKS, strict=True):
        drawn = drawn.replace(f"var({colour})", ink)
    opening, _, rest = drawn.partition(">")
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{opening}>{STYLE}{rest}\n"
