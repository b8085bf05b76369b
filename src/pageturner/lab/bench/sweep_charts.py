"""Lines over load, as SVG: a marker for each measured point, a bar for the spread of its rounds, dashes for
what was simulated. Standard library only.

Owns marks, axes and colours. Must not know servers or figures. Servers differ in the shape of their markers
too, so that nothing hangs on hue alone; a picture is narrow enough to be read on a phone without scrolling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 40, 46
SPAN = 12.0  # most by least: an axis of more is logarithmic, where it may be
COLOURS = 4  # further lines begin again with the first colour, and another marker
STYLE = """
.sw { color: #1f2328; font: 13px system-ui, sans-serif; display: block; width: 100%; height: auto }
.sw text { fill: currentColor } .sw .soft { fill: #59636e; font-size: 12px }
.sw .title { font-weight: 600; font-size: 14px }
.sw .grid { stroke: #d8dee4; fill: none } .sw .axis { stroke: #8b949e; fill: none }
.sw .mean { fill: none; stroke-width: 2; stroke-linejoin: round }
.sw .told { fill: none; stroke-width: 1.8; stroke-dasharray: 5 4 }
.sw .spread { fill: none; stroke-width: 6; opacity: .28; stroke-linecap: round }
.sw .ring { fill: none; stroke-width: 1.5 } .sw .hit { fill: transparent; stroke: none }
.sw .mark { stroke: #ffffff; stroke-width: 1 }
.sw .c0 { stroke: #2f6fce } .sw .c1 { stroke: #c96a00 } .sw .c2 { stroke: #14806f }
.sw .c3 { stroke: #a83a84 }
.sw .f0 { fill: #2f6fce } .sw .f1 { fill: #c96a00 } .sw .f2 { fill: #14806f } .sw .f3 { fill: #a83a84 }
@media (prefers-color-scheme: dark) {
.sw { color: #e6edf3 } .sw .soft { fill: #9198a1 } .sw .grid { stroke: #30363d }
.sw .axis { stroke: #6e7681 } .sw .mark { stroke: #0d1117 }
.sw .c0 { stroke: #5a9bf0 } .sw .c1 { stroke: #f0a040 } .sw .c2 { stroke: #3fc1ad }
.sw .c3 { stroke: #e58cc4 }
.sw .f0 { fill: #5a9bf0 } .sw .f1 { fill: #f0a040 } .sw .f2 { fill: #3fc1ad } .sw .f3 { fill: #e58cc4 }
}
"""


@dataclass(frozen=True, slots=True)
class LinePoint:
    """x and y of the median, least and most y of the rounds, and what stands in the hint."""

    x: float
    y: float
    low: float
    high: float
    hint: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """points: measured; told: simulated, as (x, y); ring: x of the point with a ring around it."""

    points: list[LinePoint]
    told: list[tuple[float, float]] = field(default_factory=list)
    ring: float | None = None


@dataclass(frozen=True, slots=True)
class PlotScale:
    """From values to pixels. log: logarithmic."""

    least: float
    most: float
    begin: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, value = (self._place(one) for one in (self.least, self.most, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)

    def _place(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.log else value

    def ticks(self) -> list[float]:
        """Round numbers, three to seven of them."""
        if not self.log:
            power = 10.0 ** math.floor(math.log10(self.most / 4))
            step = next(power * f for f in (1, 2, 5, 10) if power * f >= self.most / 5)
            return [step * i for i in range(int(self.most / step + 1e-9) + 1)]
        powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**p for p in powers for f in factors]
            found = [tick for tick in found if self.least * 0.999 <= tick <= self.most * 1.001]
            if len(found) <= 7:
                break
        return found


def value_scale(values: Sequence[float], log: bool) -> PlotScale:
    """The vertical axis: from 0, or logarithmic where values are far apart and that is wanted."""
    known = [value for value in values if value > 0] or [1.0]
    least, most = min(known), max(known)
    if log and most / least > SPAN:
        return PlotScale(least / 1.25, most * 1.25, HEIGHT - BOTTOM, TOP, True)
    return PlotScale(0.0, most * 1.08, HEIGHT - BOTTOM, TOP, False)


def chart(
    title: str,
    unit: str,
    across: str,
    lines: Sequence[ChartLine],
    *,
    log: bool = False,
    loads: bool = True,
) -> str:
    """Lines over load. unit: of the vertical axis; across: what the horizontal one shows, with its unit; log:
    whether the vertical axis may be logarithmic; loads: whether x is a load, with a tick at each."""
    xs = sorted(
        {p.x for line in lines for p in line.points} | {x for line in lines for x, _ in line.told}
    )
    ys = [y for line in lines for p in line.points for y in (p.low, p.high, p.y)]
    scale = value_scale([*ys, *(y for line in lines for _, y in line.told)], log)
    if not xs:
        return ""
    if loads:
        pad = 1.12
        bottom = PlotScale(xs[0] / pad, xs[-1] * pad, LEFT, WIDTH - RIGHT, True)
    else:
        bottom = PlotScale(0.0, xs[-1] * 1.08, LEFT, WIDTH - RIGHT, False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sw" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(f"{title}, {unit}, over {across}")}">',
        _text(LEFT - 50, 18, title, "title"),
        _text(WIDTH - RIGHT, 18, f"{unit}{', log scale' if scale.log else ''}", "soft", "end"),
        *_axes(bottom, scale, _thinned(xs, bottom) if loads else bottom.ticks(), across),
    ]
    for number, line in enumerate(lines):
        parts += _line(line, number, bottom, scale)
    return "\n".join([*parts, "</svg>"])


def key(number: int, dashed: bool = False) -> str:
    """The swatch of a line, for a legend in the text around."""
    colour = number % COLOURS
    mark = (
        f'<path class="told c{colour}" d="M1 8H27"/>'
        if dashed
        else f'<path class="mean c{colour}" d="M1 8H27"/>{_mark(number, 14, 8)}'
    )
    return f'<svg class="sw key" viewBox="0 0 28 16" width="28" height="16" aria-hidden="true">{mark}</svg>'


def _axes(bottom: PlotScale, scale: PlotScale, ticks: Sequence[float], across: str) -> list[str]:
    floor, parts = HEIGHT - BOTTOM, []
    for tick in scale.ticks():
        y = scale.at(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 7, y + 4, short(tick), "soft", "end"))
    for tick in ticks:
        x = bottom.at(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {floor}v4"/>')
        parts.append(_text(x, floor + 18, short(tick), "soft", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, across, "soft", "middle"))
    return parts


def _thinned(xs: Sequence[float], bottom: PlotScale) -> list[float]:
    """Those that have room beside each other."""
    kept: list[float] = []
    for x in xs:
        if not kept or bottom.at(x) - bottom.at(kept[-1]) >= 30:
            kept.append(x)
    return kept


def _line(line: ChartLine, number: int, bottom: PlotScale, scale: PlotScale) -> list[str]:
    colour, parts = number % COLOURS, []
    told = "L".join(f"{bottom.at(x):.1f} {scale.at(y):.1f}" for x, y in line.told)
    if told:
        parts.append(f'<path class="told c{colour}" d="M{told}"/>')
    for p in line.points:
        low, high = scale.at(p.low), scale.at(p.high)
        if low - high > 1:
            parts.append(
                f'<path class="spread c{colour}" d="M{bottom.at(p.x):.1f} {low:.1f}V{high:.1f}"/>'
            )
    path = "L".join(f"{bottom.at(p.x):.1f} {scale.at(p.y):.1f}" for p in line.points)
    if path:
        parts.append(f'<path class="mean c{colour}" d="M{path}"/>')
    for p in line.points:
        x, y = bottom.at(p.x), scale.at(p.y)
        ring = ""
        if p.x == line.ring:
            ring = f'<circle class="ring c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        parts.append(
            f'<g><title>{escape(p.hint)}</title><circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="13"/>'
            f"{_mark(number, x, y)}{ring}</g>"
        )
    return parts


def _mark(number: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond: another one for each line."""
    kind = f'class="mark f{number % COLOURS}"'
    shape = (number + number // COLOURS) % 4
    if shape == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    if shape == 1:
        return f'<rect {kind} x="{x - 4.2:.1f}" y="{y - 4.2:.1f}" width="8.4" height="8.4"/>'
    path = "l5.4 9.4h-10.8z" if shape == 2 else "l5.6 5.8l-5.6 5.8l-5.6-5.8z"
    return f'<path {kind} d="M{x:.1f} {y - 5.8:.1f}{path}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def short(value: float) -> str:
    """A number of an axis."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
