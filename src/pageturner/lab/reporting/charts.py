"""SVG charts without a library: values over time, bars, and lines over load.

Owns marks, axes and colours. Must not know how a figure was made, nor what a run or a server is.
Names stand above what they name, so that a picture may be as narrow as a phone. Colours follow the
viewer's preference, light or dark. Kinds of marks also differ in lightness, hatching or shape, so
that nothing depends on hue alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDE, NARROW = 1000, 360  # widths of pictures for a desktop and for a phone
LEFT, RIGHT, FOOT, GAP = 34, 14, 22, 10
NAME = 18  # height of the line above a row or a panel that names it
BAR = 36.0  # height of a bar with its name above it
LETTER = 5.9  # approximate width of a letter
BINS = 320  # values of a series over the axis of time
STYLE = """
.pt { color: #1f2328; font: 12px system-ui, sans-serif }
.pt text { fill: currentColor }
.pt .page { fill: #ffffff }
.pt .soft { fill: #59636e; font-size: 11px }
.pt .title { font-weight: 600 }
.pt .grid { stroke: #d8dee4; fill: none }
.pt .line { stroke: currentColor; fill: none; stroke-width: 1.5 }
.pt .dashed { stroke: #59636e; fill: none; stroke-dasharray: 4 3 }
.pt .decode { fill: #3b7dd8 } .pt .prefill { fill: #e08a1e }
.pt .stalled { fill: #f3c6cf } .pt .padding { fill: url(#pt-hatch) } .pt .frame { fill: #eef1f4 }
.pt .hatch { stroke: #8b949e } .pt .used { fill: #3b7dd8 } .pt .waste { fill: #e08a1e }
.pt .loud { stroke: #e08a1e; fill: none; stroke-width: 2 }
.pt .quiet { stroke: #3b7dd8; fill: none; opacity: .7 }
@media (prefers-color-scheme: dark) {
.pt { color: #e6edf3 }
.pt .page { fill: #0d1117 }
.pt .soft { fill: #9198a1 }
.pt .grid { stroke: #30363d } .pt .dashed { stroke: #9198a1 }
.pt .stalled { fill: #6e3440 } .pt .frame { fill: #1a2029 } .pt .hatch { stroke: #6e7681 }
.pt .decode, .pt .used { fill: #5a9bf0 } .pt .prefill, .pt .waste { fill: #f0a040 }
}
"""
# Tenants: the loudest one first. A prompt is as its answer, and paler.
COLOURS = (
    "#d9730d",
    "#3b7dd8",
    "#2a9d6f",
    "#8a5cd0",
    "#c2438b",
    "#1f9bb3",
    "#7a8b1e",
    "#b0523c",
    "#5866c9",
    "#4c8c4a",
)
TENANTS = "".join(f".pt .tenant{i} {{ fill: {colour} }} " for i, colour in enumerate(COLOURS)) + (
    ".pt .paler { opacity: .45 }\n"
)
HATCH = (
    '<defs><pattern id="pt-hatch" width="5" height="5" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><path class="hatch" d="M0 0V5" stroke-width="2.4"/></pattern></defs>'
)
LINES = ("dashed", "loud", "quiet")  # kinds of marks that are lines; the others are filled


def standalone(svg: str) -> str:
    """Return a picture as a file of its own, with its colours."""
    opening, _, rest = svg.partition(">")
    tenants = TENANTS if "tenant0" in rest else ""
    return f'{opening}><style>{STYLE}{tenants}</style><rect class="page" width="100%" height="100%"/>{rest}'


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that maps `low` to `high` onto the pixels `begin` to `end`, in either direction."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, place = (self._scaled(each) for each in (self.low, self.high, value))
        share = (place - low) / (high - low) if high > low else 0.5
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)

    def _scaled(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.log else value

    def ticks(self, count: int = 6) -> list[float]:
        """Return round numbers: about `count` of them on a linear axis, at most seven on a
        logarithmic one."""
        if not self.log:
            rough = self.high / count
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
            return [step * i for i in range(int(self.high / step + 1e-9) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**p for p in powers for f in factors]
            found = [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(found) <= 7:
                break
        return found


def time_axis(seconds: Iterable[float], width: float = WIDE) -> Axis:
    """Return the axis of time that all panels of a picture of this width share."""
    return Axis(0.0, max([*seconds, 1e-6]), LEFT, width - RIGHT)


def svg(label: str, parts: Iterable[str], width: float, height: float) -> str:
    """Return the picture that these parts make."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([opening, HATCH, *parts, "</svg>"])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def short(value: float) -> str:
    """Return a number as an axis shows it."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def grid(axis: Axis, top: float, bottom: float, unit: str) -> list[str]:
    """Return vertical lines with numbers below them; the last number carries the unit."""
    width = axis.end + RIGHT
    ticks = axis.ticks(6 if axis.end - axis.begin > 500 else 5)
    parts = []
    for tick in ticks:
        x = axis.at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        words = f"{tick:,g} {unit}" if tick == ticks[-1] else f"{tick:,g}"
        if x + LETTER * len(words) / 2 > width:
            parts.append(text(width - 2, bottom + 14, words, "soft", "end"))
        else:
            parts.append(text(x, bottom + 14, words, "soft", "middle"))
    return parts


def legend(kinds: Iterable[tuple[str, str]], width: float) -> tuple[list[str], float]:
    """Return swatches and words, in as many lines as they need, and the y where the next thing may
    begin."""
    parts = []
    x = 4.0
    y = 14.0
    for kind, words in kinds:
        size = 34 + LETTER * len(words)
        if x + size > width and x > 4:
            x = 4.0
            y += 17
        if kind in LINES:
            parts.append(f'<path class="{kind}" d="M{x:.1f} {y - 4:.1f}h16"/>')
        else:
            swatch = f'x="{x:.1f}" y="{y - 10:.1f}" width="14" height="11"'
            parts.append(f'<rect class="{kind}" {swatch}/>')
        parts.append(text(x + 19, y, words, "soft"))
        x += size
    return parts, y + 12


# -- values over time ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One value for each of BINS bins over the whole axis of time. name: for the legend, by
    kind."""

    kind: str
    name: str
    values: Sequence[float]
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One run: areas that stand on each other, and lines in front of them that do not add up."""

    name: str
    areas: Sequence[ChartSeries]
    lines: Sequence[ChartSeries]

    @property
    def highest(self) -> float:
        stacked = map(sum, zip(*(area.values for area in self.areas), strict=True))
        return max(
            [*stacked, *(value for line in self.lines for value in line.values)], default=0.0
        )


def panels(each: Sequence[Panel], axis: Axis, unit: str, height: float = 84) -> str:
    """Draw one panel below the other, all with the same scale."""
    high = max((panel.highest for panel in each), default=0.0) or 1.0
    width = axis.end + RIGHT
    named = {one.kind: one.name for panel in each for one in (*panel.areas, *panel.lines)}
    parts, top = legend(named.items(), width)
    y = top
    for panel in each:
        parts.append(text(4, y + 11, panel.name, "title"))
        parts.append(text(width - 4, y + 11, unit, "soft", "end"))
        y += NAME + height
        scale = Axis(0.0, high, y, y - height)
        for tick in scale.ticks(3):
            level = scale.at(tick)
            parts.append(f'<path class="grid" d="M{axis.begin:.1f} {level:.1f}H{axis.end:.1f}"/>')
            parts.append(text(axis.begin - 4, level + 4, short(tick), "soft", "end"))
        base = [0.0] * BINS
        for area in panel.areas:
            tops = [a + b for a, b in zip(base, area.values, strict=True)]
            outline = _stairs(tops, axis, scale) + _stairs(base, axis, scale)[::-1]
            parts.append(f'<path class="{area.kind}" d="M{"L".join(outline)}Z"/>')
            base = tops
        for line in panel.lines:
            last = max((i for i, value in enumerate(line.values) if value), default=0)
            path = "L".join(_stairs(line.values[: last + 1], axis, scale))
            hint = f"<title>{escape(line.hint)}</title>" if line.hint else ""
            parts.append(f'<path class="{line.kind}" d="M{path}">{hint}</path>')
        y += GAP
    bottom = y - GAP + 2
    return svg(unit, grid(axis, top, bottom, "s") + parts, width, bottom + FOOT)


def _stairs(values: Sequence[float], axis: Axis, scale: Axis) -> list[str]:
    """Return the points of a line that is level within a bin; a level stretch is two points."""
    points: list[str] = []
    width = (axis.end - axis.begin) / BINS
    for i, value in enumerate(values):
        level = f"{scale.at(value):.1f}"
        if i and points[-1].endswith(f" {level}"):
            points.pop()
        else:
            points.append(f"{axis.begin + i * width:.1f} {level}")
        points.append(f"{axis.begin + (i + 1) * width:.1f} {level}")
    return points


# -- bars ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar below its name. tail: two larger values, to which thin lines lead; end: words behind
    the last."""

    name: str
    value: float
    tail: tuple[float, ...] = ()
    end: str = ""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars side by side. mark: the value of a dashed line, and what it means."""

    title: str
    unit: str
    rows: Sequence[Bar]
    mark: tuple[float, str] | None = None


def bars(chart: BarChart, width: float = WIDE) -> str:
    """Draw horizontal bars."""
    values = [value for row in chart.rows for value in (row.value, *row.tail)]
    high = max([*values, chart.mark[0] if chart.mark else 0.0]) or 1.0
    axis = Axis(0.0, high, 4.0, width - 66)
    parts = _wrapped(14, chart.title, "title", width)
    top = 10 + 15.0 * len(parts)
    y = top
    for row in chart.rows:
        parts.append(text(4, y + 14, row.name))
        x, *ends = map(axis.at, (row.value, *row.tail))
        box = f'x="4" y="{y + NAME + 2:.1f}" width="{x - axis.begin:.1f}" height="12"'
        parts.append(f'<rect class="decode" {box}/>')
        for kind, end in zip(("line", "dashed"), ends, strict=False):
            parts.append(f'<path class="{kind}" d="M{x:.1f} {y + NAME + 8:.1f}H{end:.1f}"/>')
            x = end
        if row.end:
            parts.append(f'<path class="line" d="M{x:.1f} {y + NAME + 3:.1f}v10"/>')
            parts.append(text(x + 5, y + NAME + 12, row.end, "soft"))
        y += BAR
    below: list[str] = []
    if chart.mark:
        value, words = chart.mark
        parts.append(f'<path class="dashed" d="M{axis.at(value):.1f} {top:.1f}V{y:.1f}"/>')
        below = _wrapped(y + FOOT + 15, f"dashed: {words}", "soft", width)
    parts = grid(axis, top, y + 2, chart.unit) + parts + below
    return svg(chart.title, parts, width, y + FOOT + 2 + 15 * len(below))


def _wrapped(y: float, words: str, kind: str, width: float) -> list[str]:
    """Return a text in as many lines as the width wants."""
    lines = textwrap.wrap(words, max(20, int((width - 8) / LETTER)))
    return [text(4, y + 15 * number, line, kind) for number, line in enumerate(lines)]


# -- lines over load -------------------------------------------------------------------------------

WIDTH, HEIGHT = 460, 290
SIDE, TOP, FLOOR = 58, 40, 244
SPAN = 12.0  # largest by smallest value from which on an axis is logarithmic, where it may be
COLOURS_OF_LINES = 4  # further lines begin again with the first colour, and another marker
LINES_STYLE = """
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
    """The median of some rounds at x, their least and most, and the hint of its marker."""

    x: float
    y: float
    low: float
    high: float
    hint: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """points: measured; simulated: pairs of x and y, drawn dashed; ring: x of the point that gets a
    ring."""

    points: Sequence[LinePoint]
    simulated: Sequence[tuple[float, float]] = ()
    ring: float | None = None


@dataclass(frozen=True, slots=True)
class LineChart:
    """unit: of the vertical axis, which may be logarithmic with `log`; across: what the horizontal
    axis shows. loads: whether x is a load, with a tick at each one on a logarithmic axis."""

    title: str
    unit: str
    across: str
    log: bool = False
    loads: bool = True


def value_axis(values: Sequence[float], log: bool) -> Axis:
    """Return the vertical axis: from 0, or logarithmic where `log` allows it and values are far
    apart."""
    known = [value for value in values if value > 0] or [1.0]
    low = min(known)
    high = max(known)
    if log and high / low > SPAN:
        return Axis(low / 1.25, high * 1.25, FLOOR, TOP, log=True)
    return Axis(0.0, high * 1.08, FLOOR, TOP)


def lines_chart(about: LineChart, lines: Sequence[ChartLine]) -> str:
    """Draw a marker for each measured point, a pale bar for the spread of its rounds, and dashes
    for what was simulated; "" where there is no point."""
    points = [point for line in lines for point in line.points]
    dashes = [pair for line in lines for pair in line.simulated]
    xs = sorted({point.x for point in points} | {x for x, _ in dashes})
    if not xs:
        return ""
    ys = [y for point in points for y in (point.low, point.high, point.y)]
    scale = value_axis([*ys, *(y for _, y in dashes)], about.log)
    end = WIDTH - 18
    bottom = Axis(0.0, xs[-1] * 1.08, SIDE, end)
    ticks = bottom.ticks(5)
    if about.loads:
        bottom = Axis(xs[0] / 1.12, xs[-1] * 1.12, SIDE, end, log=True)
        ticks = _apart(xs, bottom)
    label = escape(f"{about.title}, {about.unit}, over {about.across}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sw" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}">',
        text(SIDE - 50, 18, about.title, "title"),
        text(end, 18, f"{about.unit}{', log scale' * scale.log}", "soft", "end"),
    ]
    for tick in scale.ticks(5):
        y = scale.at(tick)
        parts.append(f'<path class="grid" d="M{SIDE} {y:.1f}H{end}"/>')
        parts.append(text(SIDE - 7, y + 4, short(tick), "soft", "end"))
    for tick in ticks:
        x = bottom.at(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {FLOOR}v4"/>')
        parts.append(text(x, FLOOR + 18, short(tick), "soft", "middle"))
    parts.append(f'<path class="axis" d="M{SIDE} {FLOOR}H{end}"/>')
    parts.append(text((SIDE + end) / 2, HEIGHT - 8, about.across, "soft", "middle"))
    for number, line in enumerate(lines):
        parts += _line(line, number, bottom, scale)
    return "\n".join([*parts, "</svg>"])


def line_key(number: int, dashed: bool = False) -> str:
    """Return the swatch of a line, for a legend in the text around the chart."""
    kind = "told" if dashed else "mean"
    path = f'<path class="{kind} c{number % COLOURS_OF_LINES}" d="M1 8H27"/>'
    mark = "" if dashed else _mark(number, 14, 8)
    size = 'viewBox="0 0 28 16" width="28" height="16"'
    return f'<svg class="sw key" {size} aria-hidden="true">{path}{mark}</svg>'


def _apart(xs: Sequence[float], axis: Axis) -> list[float]:
    """Return the values whose numbers have room beside each other."""
    kept: list[float] = []
    for x in xs:
        if not kept or axis.at(x) - axis.at(kept[-1]) >= 30:
            kept.append(x)
    return kept


def _line(line: ChartLine, number: int, bottom: Axis, scale: Axis) -> list[str]:
    colour = f"c{number % COLOURS_OF_LINES}"
    spreads: list[str] = []
    marks: list[str] = []
    for point in line.points:
        x = bottom.at(point.x)
        y, low, high = map(scale.at, (point.y, point.low, point.high))
        if low - high > 1:
            spreads.append(f'<path class="spread {colour}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        place = f'cx="{x:.1f}" cy="{y:.1f}"'
        ring = f'<circle class="ring {colour}" {place} r="9"/>' if point.x == line.ring else ""
        hit = f'<title>{escape(point.hint)}</title><circle class="hit" {place} r="13"/>'
        marks.append(f"<g>{hit}{_mark(number, x, y)}{ring}</g>")
    measured = [(point.x, point.y) for point in line.points]
    paths = []
    for kind, pairs in (("told", line.simulated), ("mean", measured)):
        path = "L".join(f"{bottom.at(x):.1f} {scale.at(y):.1f}" for x, y in pairs)
        if path:
            paths.append(f'<path class="{kind} {colour}" d="M{path}"/>')
    return [*spreads, *paths, *marks]


def _mark(number: int, x: float, y: float) -> str:
    """Return a circle, square, triangle or diamond: lines of one colour differ in their markers."""
    shape = (number + number // COLOURS_OF_LINES) % 4
    path = (
        "m0 1.3a4.5 4.5 0 1 0 .1 0z",
        "m-4.2 1.6h8.4v8.4h-8.4z",
        "l5.4 9.4h-10.8z",
        "l5.6 5.8l-5.6 5.8l-5.6-5.8z",
    )
    return (
        f'<path class="mark f{number % COLOURS_OF_LINES}" d="M{x:.1f} {y - 5.8:.1f}{path[shape]}"/>'
    )
