"""The report of an improvement: who raced, how far each came, and the result on held-out states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from embodied.improvement.race import BASE, SAMPLER, Improvement, Journal, Leg
from embodied.reports.page import Point, chart, figure, film_figure, head, table, write_page


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
    spent = "-" if name in (BASE, SAMPLER) else f"{budget:,.4g}"
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
    limits = (0.0, 1.0) if _rates(journal.legs) else (None, None)
    return chart(series, "score", bands, limits=limits)


def _rates(legs: Sequence[Leg]) -> bool:
    return all(leg.score.is_rate for leg in legs if leg.score is not None)
