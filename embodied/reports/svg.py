"""Line charts as SVG text; they use the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
DOTS = 40  # points of a line that are drawn one by one, at most
COLOURS = ("--main", "--second", "--third", "--fourth", "--fifth", "--sixth")

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points (x, y) and, optionally, a band (low, high) around each."""

    points: Sequence[Point]
    band: Sequence[Point] = field(default=())


def chart(curve: Curve, title: str, low: float | None = None, high: float | None = None) -> str:
    """An SVG of one curve; `low` and `high` fix the vertical range. Non-finite values are left
    out."""
    points = [(x, y) for x, y in curve.points if math.isfinite(y)]
    if not points:
        return ""
    frame = framed([*points, *((points[0][0], y) for pair in curve.band for y in pair)], low, high)
    return svg(title, [frame.grid(), frame.band(points, curve.band), frame.line(points)])


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

    def band(self, points: Sequence[Point], band: Sequence[Point]) -> str:
        if len(band) != len(points):
            return ""
        lower = [(x, low) for (x, _), (low, _) in zip(points, band, strict=True)]
        upper = [(x, high) for (x, _), (_, high) in zip(points, band, strict=True)]
        if len(points) == 1:
            x = self.x(points[0][0])
            return (
                f'<path class="whisker" d="M{x:.1f} {self.y(band[0][0]):.1f}'
                f'V{self.y(band[0][1]):.1f}"/>'
            )
        return f'<polygon class="band" points="{self.path([*lower, *reversed(upper)])}"/>'

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
        """A dashed line across."""
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


def several(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """An SVG of several curves on the same axes, with a legend."""
    finite = {n: [(x, y) for x, y in points if math.isfinite(y)] for n, points in series.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return ""
    every = [point for points in finite.values() for point in points]
    frame = framed(every)
    drawn = [frame.grid()]
    drawn += [coloured(frame, points, k) for k, points in enumerate(finite.values())]
    return svg(title, drawn) + legend(finite)


def against(left: Sequence[Point], right: Sequence[Point], names: tuple[str, str]) -> str:
    """An SVG of two curves of different units over the same steps: the first with the left axis,
    the second with the right axis."""
    one, two = framed(left), framed(right, 0.0, 1.0)
    drawn = [one.grid(), coloured(one, left, 0), coloured(two, right, 1)]
    drawn += [
        f'<text x="{WIDTH - RIGHT - 4}" y="{two.y(value) + 4:.1f}" class="y second">'
        f"{number(value)}</text>"
        for value in ticks(two.bottom, two.top, 4)
    ]
    return svg(" and ".join(names), drawn) + legend(names)


def framed(points: Sequence[Point], low: float | None = None, high: float | None = None) -> Frame:
    """A frame that contains all points, from x = 0."""
    heights = [y for _, y in points]
    bottom = min(heights) if low is None else low
    top = max(heights) if high is None else high
    if top - bottom < 1e-12 * max(1.0, abs(top)):
        bottom, top = bottom - 0.5 * max(abs(bottom), 1e-3), top + 0.5 * max(abs(top), 1e-3)
    return Frame(0.0, max(max(x for x, _ in points), 1e-9), bottom, top)


def coloured(frame: Frame, points: Sequence[Point], number: int) -> str:
    """One of several lines; dashed where all colours have been used."""
    dashed = number >= len(COLOURS)
    return frame.line(points, f"var({COLOURS[number % len(COLOURS)]})", dashed)


def legend(names: Iterable[str]) -> str:
    spans = [
        f'<span style="color:var({COLOURS[number % len(COLOURS)]})">{escape(name)}'
        f"{' (dashed)' if number >= len(COLOURS) else ''}</span>"
        for number, name in enumerate(names)
    ]
    return f'<p class="legend">{" ".join(spans)}</p>'


def svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
