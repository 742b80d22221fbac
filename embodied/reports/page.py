"""HTML pages, complete in themselves, and line charts as SVG text in the page's colours (page.css),
light or dark."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from embodied.core.atomic_write import write_durably

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
DOTS = 40  # points of a line that are drawn one by one, at most
COLOURS = ("--main", "--second", "--third", "--fourth", "--fifth", "--sixth")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

Point = tuple[float, float]


def write_page(path: Path, title: str, body: Iterable[str], style: str = "") -> Path:
    """Write a page with `body` and, after the style of all pages, `style`; returns `path`."""
    style = Path(__file__).with_name("page.css").read_text() + style
    page = PAGE.format(title=escape(title), style=style, body="\n".join(body)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda sink: sink.write(page))
    return path


def head(title: str, *says: str) -> str:
    lines = "".join(f"<p>{escape(each)}</p>" for each in says if each)
    return f"<header><h1>{escape(title)}</h1>{lines}</header>"


def figure(drawn: str, caption: str = "", value: str = "") -> str:
    """A drawing below a caption, with `value` in bold beside it."""
    if not drawn:
        return "<p>nothing to draw yet</p>"
    bold = f"<b>{escape(value)}</b>" if value else ""
    above = f"<figcaption>{escape(caption)}{bold}</figcaption>" if caption else ""
    return f"<figure>{above}{drawn}</figure>"


def film_figure(file: Path, caption: str) -> str:
    from embodied.evaluation.video import strip_png

    picture = data_url("image/png", strip_png(file))
    film = data_url("video/mp4", file.read_bytes())
    drawn = (
        f'<img alt="{escape(caption)}" src="{picture}"><details><summary>play</summary>'
        f'<video controls loop muted src="{film}"></video></details>'
    )
    return figure(drawn, caption)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; without heads the first cell of each row is the row's head."""
    lines = ["".join(f"<th>{escape(each)}</th>" for each in heads)] if heads else []
    for row in rows:
        first = 0 if heads else 1
        cells = [f"<{'th' if k < first else 'td'}>{escape(str(v))}" for k, v in enumerate(row)]
        lines.append("".join(f"{cell}</{cell[1:3]}>" for cell in cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines for a terminal, whose cells are below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chart(
    series: Mapping[str, Sequence[Point]],
    title: str,
    bands: Mapping[str, Sequence[Point]] | None = None,
    levels: Mapping[str, float] | None = None,
    limits: tuple[float | None, float | None] = (None, None),
    colours: Mapping[str, int] | None = None,
    legend: bool = True,
) -> str:
    """An SVG of curves on the same axes; "" without points. Non-finite values are left out.

    `bands` are (low, high) around each point of a curve, `levels` dashed lines across, `limits` fix
    the vertical range, `colours` number the curves' colours. Without `legend` all curves have the
    page's own style.
    """
    finite = {n: [(x, y) for x, y in points if math.isfinite(y)] for n, points in series.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return ""
    bands, levels = bands or {}, levels or {}
    names = [*finite, *levels]
    numbers = colours or {name: index for index, name in enumerate(names)}
    every = [point for points in finite.values() for point in points]
    every += [(0.0, y) for name in finite for pair in bands.get(name, ()) for y in pair]
    frame = framed([*every, *((0.0, y) for y in levels.values())], *limits)
    inks = {name: colour(numbers[name]) if legend else "" for name in names}
    drawn = [frame.grid()]
    drawn += [frame.band(points, bands.get(n, ()), inks[n]) for n, points in finite.items()]
    drawn += [
        frame.line(points, inks[n], numbers[n] >= len(COLOURS)) for n, points in finite.items()
    ]
    drawn += [frame.level(y, inks[n]) for n, y in levels.items()]
    return svg(title, drawn) + (
        legend_of({name: numbers[name] for name in names}) if legend else ""
    )


@dataclass(frozen=True)
class Frame:
    """Maps data to pixels."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def grid(self) -> str:
        parts = []
        for value in ticks(self.bottom, self.top, 4):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" class="y">{number(value)}</text>')
        for value in ticks(self.left, self.right, 5):
            x = self.x(value)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" class="x">{number(value)}</text>')
        return "".join(parts)

    def band(self, points: Sequence[Point], band: Sequence[Point], colour: str = "") -> str:
        if len(band) != len(points):
            return ""
        stroke, fill = (f' style="{k}:{colour}"' if colour else "" for k in ("stroke", "fill"))
        lower = [(x, low) for (x, _), (low, _) in zip(points, band, strict=True)]
        upper = [(x, high) for (x, _), (_, high) in zip(points, band, strict=True)]
        if len(points) == 1:
            x = self.x(points[0][0])
            return (
                f'<path class="whisker" d="M{x:.1f} {self.y(band[0][0]):.1f}'
                f'V{self.y(band[0][1]):.1f}"{stroke}/>'
            )
        return f'<polygon class="band" points="{self.path([*lower, *reversed(upper)])}"{fill}/>'

    def line(self, points: Sequence[Point], colour: str = "", dashed: bool = False) -> str:
        """A line in `colour` (of the page's style without one), with dots where points are few: a
        single one is a dot."""
        dashes = ";stroke-dasharray:6 4" if dashed else ""
        stroke = f' style="stroke:{colour}{dashes}"' if colour else ""
        fill = f' style="fill:{colour}"' if colour else ""
        line = f'<polyline class="line"{stroke} points="{self.path(points)}"/>'
        if len(points) > DOTS:
            return line
        return line + "".join(
            f'<circle class="dot"{fill} cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3">'
            f"<title>step {x:,.0f}: {number(y)}</title></circle>"
            for x, y in points
        )

    def level(self, height: float, colour: str) -> str:
        y = self.y(height)
        return (
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" '
            f'style="stroke:{colour};stroke-width:2;stroke-dasharray:6 4"/>'
        )


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number for an axis: 1.2M, 40k, 0.35, 2e-05."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"


def against(left: Sequence[Point], right: Sequence[Point], names: tuple[str, str]) -> str:
    """An SVG of two curves of different units over the same steps: the first with the left axis,
    the second with the right axis."""
    one, two = framed(left), framed(right, 0.0, 1.0)
    drawn = [one.grid(), one.line(left, colour(0)), two.line(right, colour(1))]
    drawn += [
        f'<text x="{WIDTH - RIGHT - 4}" y="{two.y(value) + 4:.1f}" class="y second">'
        f"{number(value)}</text>"
        for value in ticks(two.bottom, two.top, 4)
    ]
    return svg(" and ".join(names), drawn) + legend_of({name: k for k, name in enumerate(names)})


def framed(points: Sequence[Point], low: float | None = None, high: float | None = None) -> Frame:
    heights = [y for _, y in points]
    bottom = min(heights) if low is None else low
    top = max(heights) if high is None else high
    if top - bottom < 1e-12 * max(1.0, abs(top)):
        bottom, top = bottom - 0.5 * max(abs(bottom), 1e-3), top + 0.5 * max(abs(top), 1e-3)
    return Frame(0.0, max(max(x for x, _ in points), 1e-9), bottom, top)


def colour(number: int) -> str:
    """One of the page's colours, again from the first where all have been used."""
    return f"var({COLOURS[number % len(COLOURS)]})"


def legend_of(numbers: Mapping[str, int]) -> str:
    spans = [
        f'<span style="color:{colour(number)}">{escape(name)}'
        f"{' (dashed)' if number >= len(COLOURS) else ''}</span>"
        for name, number in numbers.items()
    ]
    return f'<p class="legend">{" ".join(spans)}</p>'


def svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
