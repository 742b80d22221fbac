"""Compares several runs on one HTML page: training curves, success, videos, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from embodied.evaluation.statistics import rate, wilson
from embodied.reports.page import Point, chart, colour, data_url, number, write_page
from embodied.reports.run_report import components, config_of, curve_names, intervals_of, won_of
from embodied.training.logger import read_metrics
from embodied.viewer.run_folder import ViewerError

FIRST = ("eval/success", "eval/return", "eval/length", "train/success", "train/return")
"""Curves that come first."""
MOST = 12
"""Most curves on the page: the first that runs have in common."""
BYTES = 4_000_000
"""Total size of embedded videos; larger ones are left out, and the page says so."""
WEB = files("embodied.viewer.export") / "web"
GROUPS = ("env", "policy", "finetune", "learner", "reward", "teacher")
OWN = ("seed", "out", "name")
"""Settings in which the seeds of one experiment differ."""


@dataclass(frozen=True)
class RunData:
    """A run folder: its `name` on the page, its metrics line by line, its configuration, and the
    number of its curve, which it shares with runs that differ in their seed only."""

    folder: Path
    name: str
    rows: Sequence[dict[str, Any]]
    config: dict[str, Any]
    line: int

    @property
    def counts(self) -> str:
        """What its steps are: training on a dataset alone takes no environment steps."""
        data = self.config.get("data")
        offline = isinstance(data, dict) and data.get("regime") == "offline"
        return "gradient updates" if offline else "environment steps"

    def curve(self, key: str) -> list[Point]:
        return [(float(row["step"]), float(row[key])) for row in self.rows if key in row]


@dataclass(frozen=True)
class Line:
    """One curve of each figure: a run, or the mean of the seeds of an experiment."""

    runs: Sequence[RunData]

    @property
    def name(self) -> str:
        seeds = f" and other seeds ({len(self.runs)})" if len(self.runs) > 1 else ""
        return f"{self.runs[0].name}{seeds}"

    @property
    def counts(self) -> str:
        return self.runs[0].counts

    @property
    def number(self) -> int:
        return self.runs[0].line

    def curve(self, key: str) -> list[Point]:
        """The mean at the steps that all runs have."""
        return [(step, sum(values) / len(values)) for step, values in self._values(key)]

    def band(self, key: str) -> list[Point]:
        """The lowest and highest of several seeds; of a single run, its interval."""
        if len(self.runs) == 1:
            return intervals_of(key, [row for row in self.runs[0].rows if key in row])
        return [(min(values), max(values)) for _, values in self._values(key)]

    def _values(self, key: str) -> list[tuple[float, list[float]]]:
        curves = [dict(run.curve(key)) for run in self.runs]
        shared = [step for step in curves[0] if all(step in curve for curve in curves)]
        return [(step, [curve[step] for curve in curves]) for step in shared]


def lines_of(runs: Sequence[RunData]) -> list[Line]:
    numbers = dict.fromkeys(run.line for run in runs)
    return [Line([run for run in runs if run.line == number]) for number in numbers]


def compare(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares `folders` (two or more) to `path`; ViewerError if one is not a
    run."""
    if len(folders) < 2:
        raise ViewerError("give two or more runs: embodied view --compare RUN RUN")
    runs = read_runs(folders)
    names = " · ".join(
        f'<span style="color:{colour(run.line)}">{escape(run.name)}</span>' for run in runs
    )
    head = f"<header><h1>{names}</h1><p>{len(runs)} runs, side by side</p></header>"
    parts = [head, _success(runs), _curves(lines_of(runs)), _films(runs), _settings(runs)]
    title = " and ".join(run.name for run in runs)
    return write_page(path, title, parts, (WEB / "compare.css").read_text())


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read the runs; they are named by their folder, or its path where names are equal."""
    found: list[tuple[Path, list[dict[str, Any]], dict[str, Any], int]] = []
    lines: dict[Any, int] = {}
    seeds: Counter[Any] = Counter()
    for folder in folders:
        rows, config = read_metrics(folder), config_of(folder)
        if not rows:
            raise ViewerError(f"{folder} has no metrics.jsonl; give a run folder")
        same = tuple(sorted((key, str(v)) for key, v in _flat(config) if key not in OWN))
        again = seeds[same, config.get("seed")]  # the same run twice is no other seed
        seeds[same, config.get("seed")] += 1
        found.append((folder, rows, config, lines.setdefault((same, again), len(lines))))
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [
        RunData(folder, name, rows, config, line)
        for name, (folder, rows, config, line) in zip(names, found, strict=True)
    ]


def _success(runs: Sequence[RunData]) -> str:
    lines, heads = [], ("run", "success [95%]", "return", "length", "trained", "time")
    for run in runs:
        ends = [row for row in run.rows if "eval/return" in row]
        last = ends[-1] if ends else {}
        cells = [f'<b style="color:{colour(run.line)}">{escape(run.name)}</b>']
        cells += [_bar(last, colour(run.line))]
        cells += [
            number(last["eval/return"]) if last else "-",
            number(last["eval/length"]) if "eval/length" in last else "-",
            f"{run.rows[-1]['step']:,} {run.counts.split()[-1]}",
            f"{run.rows[-1].get('seconds', 0) / 60:.1f} min",
        ]
        named = zip(heads, cells, strict=True)
        lines.append("".join(f'<td data-head="{name}">{cell}</td>' for name, cell in named))
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>Last evaluation</h2><table class='last'><tr>{head}</tr>{body}</table>"


def _bar(row: dict[str, Any], colour: str) -> str:
    if "eval/success" not in row:
        return "-"
    won, trials = won_of(row)
    low, high = wilson(won, trials)
    drawn = (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="10" rx="2"/>'
        f'<rect x="{100 * low:.1f}" width="{100 * (high - low):.1f}" height="10" '
        f'style="fill:{colour};opacity:.35"/>'
        f'<rect x="{100 * won / trials - 0.6:.1f}" width="1.2" height="10" style="fill:{colour}"/>'
        "</svg>"
    )
    return f"{rate(won, trials)} of {trials}{drawn}"


def _curves(lines: Sequence[Line]) -> str:
    rows = (row for line in lines for run in line.runs for row in run.rows)
    keys = curve_names(rows, FIRST, ("step", "seconds", "eval/episodes"))
    shared = [key for key in keys if len(_drawn(lines, key)) > min(1, len(lines) - 1)]
    figures = "".join(_figure(lines, key) for key in shared[:MOST])
    return f'<h2>Training curves</h2><div class="grid2">{figures}</div>' if figures else ""


def _drawn(runs: Sequence[Line], key: str) -> dict[int, bool]:
    """The lines in the figure of `key`, and whether each is a curve. Runs that count gradient
    updates cannot share the axis of those that count environment steps: their last evaluation is
    a level."""
    having = [i for i, run in enumerate(runs) if run.curve(key)]
    stepped = [i for i in having if runs[i].counts == "environment steps"]
    if not stepped or len(stepped) == len(having):
        return dict.fromkeys(having, True)
    return {i: i in stepped for i in having if i in stepped or key.startswith("eval/")}


def _figure(runs: Sequence[Line], key: str) -> str:
    drawn = _drawn(runs, key)
    names = {
        i: runs[i].name
        if curve
        else f"{runs[i].name} (after {runs[i].curve(key)[-1][0]:,.0f} updates)"
        for i, curve in drawn.items()
    }
    made = chart(
        {names[i]: runs[i].curve(key) for i, curve in drawn.items() if curve},
        key,
        {names[i]: runs[i].band(key) for i in drawn},
        {names[i]: runs[i].curve(key)[-1][1] for i, curve in drawn.items() if not curve},
        (0.0, 1.0) if key.endswith("success") else (None, None),
        {name: runs[i].number for i, name in names.items()},
    )
    counts = next(runs[i].counts for i, curve in drawn.items() if curve)
    caption = f"<figcaption>{escape(key)} <small>by {counts}</small></figcaption>"
    return f"<figure>{caption}{made}</figure>"


def _films(runs: Sequence[RunData]) -> str:
    """A row per kind of video (success, failure), a column per run."""
    videos = {
        run.name: {f.stem: f for f in sorted(run.folder.glob("videos/*.mp4"))} for run in runs
    }
    kinds = sorted({kind for found in videos.values() for kind in found}, reverse=True)
    if not kinds:
        return ""
    room, figures = BYTES, []
    for kind in kinds:
        for run in runs:
            file = videos[run.name].get(kind)
            room -= 0 if file is None else file.stat().st_size
            figures.append(_film(run, kind, file, room >= 0, colour(run.line)))
    columns = f"grid-template-columns:repeat({len(runs)},minmax(0,1fr))"
    return f'<h2>Episodes</h2><div class="films" style="{columns}">{"".join(figures)}</div>'


def _film(run: RunData, kind: str, file: Path | None, fits: bool, colour: str) -> str:
    caption = (
        f'<figcaption><b style="color:{colour}">{escape(run.name)}</b>{escape(kind)}</figcaption>'
    )
    if file is None:
        return f"<figure>{caption}<p>no video of a {escape(kind)}</p></figure>"
    if not fits:
        return f"<figure>{caption}<p>too large to embed: {escape(str(file))}</p></figure>"
    source = data_url("video/mp4", file.read_bytes())
    film = f'<video controls autoplay loop muted playsinline src="{source}"></video>'
    return f"<figure>{caption}{film}</figure>"


def _settings(runs: Sequence[RunData]) -> str:
    """The components of each run, and the settings that differ."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    differs = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    lines = [("components", [components(run.config, GROUPS) for run in runs])]
    lines += [(key, [_value(one.get(key, "-")) for one in flat]) for key in differs if key != "out"]
    head = "".join(f'<th style="color:{colour(run.line)}">{escape(run.name)}</th>' for run in runs)
    body = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for key, values in lines
    )
    return f"<h2>Differing settings</h2><table><tr><th></th>{head}</tr>{body}</table>"


def _value(value: Any) -> str:
    """As it is written in YAML."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def _flat(node: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
