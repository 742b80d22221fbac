"""Compares several runs on one HTML page: training curves, success, videos, settings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import write_durably
from embodied.core.saved_node import read_run_settings
from embodied.evaluation.statistics import rate, wilson
from embodied.reports.run_report import PAGE, STYLE
from embodied.reports.svg import COLOURS, Frame, Point, coloured, framed, number, svg
from embodied.training.logger import read_metrics
from embodied.viewer.run_folder import ViewerError

FIRST = ("eval/success", "eval/return", "eval/length", "train/success", "train/return")
"""Curves that come first."""
MOST = 12
"""Most curves on the page: the first that runs have in common."""
BYTES = 4_000_000
"""Total size of embedded videos; larger ones are left out, and the page says so."""
GROUPS = ("env", "policy", "finetune", "learner", "reward", "teacher")


@dataclass(frozen=True)
class RunData:
    """A run folder: its `name` on the page, its metrics line by line, and its configuration."""

    folder: Path
    name: str
    rows: Sequence[dict[str, Any]]
    config: dict[str, Any]

    @property
    def counts(self) -> str:
        """What its steps are: training on a dataset alone takes no environment steps."""
        data = self.config.get("data")
        offline = isinstance(data, dict) and data.get("regime") == "offline"
        return "gradient updates" if offline else "environment steps"

    def curve(self, key: str) -> list[Point]:
        return [(float(row["step"]), float(row[key])) for row in self.rows if key in row]


def compare(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares `folders` (two or more) to `path`; ViewerError if one is not a
    run."""
    if len(folders) < 2:
        raise ViewerError("give two or more runs: embodied view --compare RUN RUN")
    runs = read_runs(folders)
    names = " · ".join(
        f'<span style="color:{_colour(i)}">{escape(run.name)}</span>' for i, run in enumerate(runs)
    )
    head = f"<header><h1>{names}</h1><p>{len(runs)} runs, side by side</p></header>"
    parts = [head, _success(runs), _curves(runs), _films(runs), _settings(runs)]
    title = " and ".join(run.name for run in runs)
    page = PAGE.format(title=escape(title), style=STYLE + MORE, body="\n".join(parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda sink: sink.write(page.encode()))
    return path


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read the runs; they are named by their folder, or its path where names are equal."""
    runs: list[RunData] = []
    for folder in folders:
        rows = read_metrics(folder)
        if not rows:
            raise ViewerError(f"{folder} has no metrics.jsonl; give a run folder")
        file = folder / "run.yaml"
        config = read_run_settings(file) if file.exists() else {}
        runs.append(RunData(folder, folder.resolve().name, rows, config))
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [RunData(run.folder, str(run.folder), run.rows, run.config) for run in runs]


def _colour(index: int) -> str:
    return f"var({COLOURS[index % len(COLOURS)]})"


def _success(runs: Sequence[RunData]) -> str:
    """The last evaluation of each run, with its interval as a bar."""
    lines, heads = [], ("run", "success [95%]", "return", "length", "trained", "time")
    for i, run in enumerate(runs):
        ends = [row for row in run.rows if "eval/return" in row]
        last = ends[-1] if ends else {}
        cells = [f'<b style="color:{_colour(i)}">{escape(run.name)}</b>', _bar(last, _colour(i))]
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
    trials = int(row["eval/episodes"])
    won = round(row["eval/success"] * trials)
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


def _curves(runs: Sequence[RunData]) -> str:
    keys = list(dict.fromkeys(key for run in runs for row in run.rows for key in row))
    keys = [key for key in keys if key not in ("step", "seconds", "eval/episodes")]
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    shared = [key for key in keys if len(_drawn(runs, key)) > 1]
    figures = "".join(_figure(runs, key) for key in shared[:MOST])
    return f'<h2>Training curves</h2><div class="grid2">{figures}</div>' if figures else ""


def _drawn(runs: Sequence[RunData], key: str) -> dict[int, bool]:
    """The runs in the figure of `key`, and whether each is a curve. Runs that count gradient
    updates cannot share the axis of those that count environment steps: their last evaluation is
    a level."""
    having = [i for i, run in enumerate(runs) if run.curve(key)]
    stepped = [i for i in having if runs[i].counts == "environment steps"]
    if not stepped or len(stepped) == len(having):
        return dict.fromkeys(having, True)
    return {i: i in stepped for i in having if i in stepped or key.startswith("eval/")}


def _figure(runs: Sequence[RunData], key: str) -> str:
    drawn = _drawn(runs, key)
    curves = {i: runs[i].curve(key) for i, curve in drawn.items() if curve}
    levels = {i: runs[i].curve(key)[-1] for i, curve in drawn.items() if not curve}
    bands = {i: _band(runs[i], key) for i in curves}
    ends = [(x, y) for band in bands.values() for x, low, high in band for y in (low, high)]
    limits = (0.0, 1.0) if key.endswith("success") else (None, None)
    heights = [(0.0, y) for _, y in levels.values()]
    frame = framed([*(p for points in curves.values() for p in points), *ends, *heights], *limits)
    parts = [frame.grid(), *(_around(frame, band, i) for i, band in bands.items())]
    parts += [coloured(frame, points, i) for i, points in curves.items()]
    parts += [frame.level(y, _colour(i)) for i, (_, y) in levels.items()]
    counts = runs[next(iter(curves))].counts
    names = {i: runs[i].name for i in curves}
    names |= {i: f"{runs[i].name} (after {x:,.0f} updates)" for i, (x, _) in levels.items()}
    caption = f"<figcaption>{escape(key)} <small>by {counts}</small></figcaption>"
    spans = [f'<span style="color:{_colour(i)}">{escape(name)}</span>' for i, name in names.items()]
    legend = f'<p class="legend">{" ".join(spans)}</p>'
    return f"<figure>{caption}{svg(key, parts)}{legend}</figure>"


def _around(frame: Frame, band: Sequence[tuple[float, float, float]], index: int) -> str:
    """The intervals around a curve; a bar where there is one."""
    low, high = [(x, y) for x, y, _ in band], [(x, y) for x, _, y in band]
    path = frame.path([*low, *reversed(high)])
    if len(band) == 1:
        return f'<polyline points="{path}" style="stroke:{_colour(index)};opacity:.5"/>'
    return f'<polygon points="{path}" style="fill:{_colour(index)};opacity:.13"/>' if band else ""


def _band(run: RunData, key: str) -> list[tuple[float, float, float]]:
    """Step and Wilson interval of each evaluated success rate."""
    if key != "eval/success":
        return []
    rows = [row for row in run.rows if key in row]
    trials = [int(row["eval/episodes"]) for row in rows]
    ends = [wilson(round(row[key] * n), n) for row, n in zip(rows, trials, strict=True)]
    return [(float(row["step"]), *end) for row, end in zip(rows, ends, strict=True)]


def _films(runs: Sequence[RunData]) -> str:
    """A row per kind of video (success, failure), a column per run."""
    files = {run.name: {f.stem: f for f in sorted(run.folder.glob("videos/*.mp4"))} for run in runs}
    kinds = sorted({kind for found in files.values() for kind in found}, reverse=True)
    if not kinds:
        return ""
    room, figures = BYTES, []
    for kind in kinds:
        for i, run in enumerate(runs):
            file = files[run.name].get(kind)
            room -= 0 if file is None else file.stat().st_size
            figures.append(_film(run, kind, file, room >= 0, _colour(i)))
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
    data = base64.b64encode(file.read_bytes()).decode()
    source = f"data:video/mp4;base64,{data}"
    film = f'<video controls autoplay loop muted playsinline src="{source}"></video>'
    return f"<figure>{caption}{film}</figure>"


def _settings(runs: Sequence[RunData]) -> str:
    """The components of each run, and the settings that differ."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    differs = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    lines = [("components", [_components(run.config) for run in runs])]
    lines += [(key, [_value(one.get(key, "-")) for one in flat]) for key in differs if key != "out"]
    head = "".join(
        f'<th style="color:{_colour(i)}">{escape(run.name)}</th>' for i, run in enumerate(runs)
    )
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


def _components(config: dict[str, Any]) -> str:
    nodes = [config.get(group) for group in GROUPS]
    names = [str(node["_target_"]).rpartition(".")[2] for node in nodes if isinstance(node, dict)]
    return " · ".join(names)


def _flat(node: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Settings by dotted name."""
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


MORE = """
.bar { height: 10px; width: 100%; margin-top: 3px; } .track { fill: var(--edge); }
.films { display: grid; gap: 14px; } .films figure { margin: 0; } .films video { width: 100%; }
@media (max-width: 560px) {
  .films { grid-template-columns: 1fr !important; }
  table { display: block; } td, th { padding: 6px; font-size: 12px; min-width: 13ch; }
  svg { overflow: visible; } svg text { font-size: 15px; }
  .last tr { display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 8px 12px; }
  .last tr + tr + tr { border-top: 1px solid var(--edge); }
  .last td { border: 0; padding: 0; min-width: 0; } .last th { display: none; }
  .last td:nth-child(2) { flex: 1 0 60%; }
  .last td:nth-child(n + 3)::before { content: attr(data-head) " "; color: var(--soft); }
}
h1 span { font-size: 24px; }
table { overflow-x: auto; }
"""
