"""Pictures of runs, as SVG: who was in each step, series over time, ranges of latency. Standard library only.

Owns marks, axes and colours. Must not know how a figure was made. All pictures of one report share the
axis of time, so that lengths compare. Colours follow what the viewer prefers, light or dark; kinds of marks
differ in lightness too, and padding is hatched, so that nothing hangs on hue alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pageturner.lab.run_timeline import RunTimeline, SlotSpan

WIDTH, LABELS, RIGHT, FOOT, GAP = 1000, 186, 60, 30, 14
BINS = 320  # of a series
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
HATCH = (
    '<defs><pattern id="pt-hatch" width="5" height="5" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><path class="hatch" d="M0 0V5" stroke-width="2.4"/></pattern></defs>'
)
KINDS = ("padding", "stalled", "prefill", "decode")  # in the order in which they are drawn
MEANING = {
    "prefill": "its prompt is computed",
    "decode": "a token of its answer in each step",
    "stalled": "it is in no step: others' prompts are computed",
    "padding": "it has ended; its row is computed all the same",
}


def standalone(svg: str) -> str:
    """A picture as a file of its own, with its colours."""
    opening, _, rest = svg.partition(">")
    return f'{opening}><style>{STYLE}</style><rect class="page" width="100%" height="100%"/>{rest}'


@dataclass(frozen=True, slots=True)
class Axis:
    """0 to `most` on so many pixels from `left` on."""

    most: float
    left: float = LABELS
    size: float = WIDTH - LABELS - RIGHT

    def at(self, value: float) -> float:
        return self.left + self.size * min(max(value / self.most, 0.0), 1.0)

    def ticks(self, about: int = 6) -> list[float]:
        """Round numbers, about so many."""
        rough = self.most / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
        return [step * i for i in range(int(self.most / step + 1e-9) + 1)]


def time_axis(seconds: Iterable[float]) -> Axis:
    """The common one."""
    return Axis(max([*seconds, 1e-6]))


def _svg(label: str, height: float, parts: Iterable[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" viewBox="0 0 {WIDTH} {height:.0f}"'
        f' width="{WIDTH}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([opening, HATCH, *parts, "</svg>"])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    about = f' class="{kind}"' if kind else ""
    return f'<text{about} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _time(axis: Axis, top: float, bottom: float) -> list[str]:
    """Lines and seconds below."""
    parts = []
    for tick in axis.ticks():
        x = axis.at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g}", "soft", "middle"))
    return [*parts, _text(WIDTH - 4, bottom + 14, "seconds", "soft", "end")]


def _legend(kinds: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """Swatches and words, in as many lines as they need; where the next thing may begin."""
    parts, x, y = [], 4.0, 14.0
    for kind, text in kinds:
        size = 38 + 5.9 * len(text)
        if x + size > WIDTH and x > 4:
            x, y = 4.0, y + 17
        if kind == "dashed":
            parts.append(f'<path class="dashed" d="M{x:.1f} {y - 4:.1f}h16"/>')
        else:
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y - 10:.1f}" width="14" height="11"/>')
        parts.append(_text(x + 19, y, text, "soft"))
        x += size
    return parts, y + 12


# -- who was in each step ------------------------------------------------------------------------------------


def gantt(runs: Sequence[tuple[str, RunTimeline]], axis: Axis) -> str:
    """A panel for each run, a line for each place in the batch: what its sequence did in each step."""
    row = min(9.0, max(2.5, 150 / max(told.slots for _, told in runs)))
    kinds = [kind for kind in MEANING if any(s.kind == kind for _, told in runs for s in told.spans)]
    parts, top = _legend([(kind, f"{kind}: {MEANING[kind]}") for kind in kinds])
    y = top
    for name, told in runs:
        height = row * told.slots
        end = axis.at(told.seconds)
        parts.append(_text(4, y + height / 2 + 4, name, "title"))
        parts.append(_text(min(end + 6, WIDTH - 2), y + height / 2 + 4, f"{told.seconds:.1f} s", "", "start"))
        parts.append(
            f'<rect class="frame" x="{axis.left}" y="{y:.1f}" width="{end - axis.left:.1f}"'
            f' height="{height:.1f}"/>'
        )
        parts += _sequences(told.spans, axis, y, row)
        y += height + GAP
    return _svg("who was in each step", y - GAP + FOOT, _time(axis, top, y - GAP + 2) + parts)


def _sequences(spans: Sequence[SlotSpan], axis: Axis, top: float, row: float) -> list[str]:
    """One group for each request, with its times as a hint; a gap of a pixel in front of it."""
    by_id: dict[int, list[SlotSpan]] = {}
    for span in spans:
        by_id.setdefault(span.id, []).append(span)
    parts = []
    for id, mine in by_id.items():
        first = min(span.begin for span in mine)
        end = max((span.end for span in mine if span.kind != "padding"), default=first)
        parts.append(f"<g><title>request {id}: in the batch from {first:.2f} to {end:.2f} s</title>")
        for kind in KINDS:
            path = "".join(_box(span, axis, top, row, first) for span in mine if span.kind == kind)
            if path:
                parts.append(f'<path class="{kind}" d="{path}"/>')
        parts.append("</g>")
    return parts


def _box(span: SlotSpan, axis: Axis, top: float, row: float, first: float) -> str:
    left = axis.at(span.begin) + (0.8 if span.begin == first else 0.0)
    width = max(axis.at(span.end) - left, 0.2)
    return f"M{left:.1f} {top + row * span.slot + 0.3:.1f}h{width:.1f}v{row - 0.6:.1f}h-{width:.1f}z"


# -- series over time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Values in BINS bins over the whole axis of time; layers of one panel stand on each other."""

    kind: str
    name: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One run: areas, and lines over them that do not add up."""

    name: str
    areas: list[ChartSeries]
    lines: list[ChartSeries]


def areas(panels: Sequence[Panel], axis: Axis, unit: str, height: float = 84) -> str:
    """Stacked areas over time, one panel below the other, with one scale."""
    most = max((_highest(panel) for panel in panels), default=0.0) or 1.0
    named = {layer.kind: layer.name for panel in panels for layer in (*panel.areas, *panel.lines)}
    parts, top = _legend(list(named.items()))
    y = top
    for panel in panels:
        scale = Axis(most, 0.0, height)
        parts.append(_text(4, y + height / 2 + 4, panel.name, "title"))
        for tick in scale.ticks(3):
            level = y + height - scale.at(tick)
            parts.append(f'<path class="grid" d="M{axis.left} {level:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LABELS - 5, level + 4, _short(tick), "soft", "end"))
        base = [0.0] * BINS
        for layer in panel.areas:
            tops = [a + b for a, b in zip(base, layer.values, strict=True)]
            parts.append(f'<path class="{layer.kind}" d="{_area(base, tops, axis, scale, y + height)}"/>')
            base = tops
        for layer in panel.lines:
            last = max((i for i, value in enumerate(layer.values) if value), default=0)
            path = "L".join(_stairs(layer.values[: last + 1], axis, scale, y + height))
            parts.append(f'<path class="{layer.kind}" d="M{path}"/>')
        y += height + GAP
    parts.append(_text(4, y - GAP + FOOT - 16, unit, "soft"))
    return _svg(unit, y - GAP + FOOT, _time(axis, top, y - GAP + 2) + parts)


def _highest(panel: Panel) -> float:
    stacked = [sum(values) for values in zip(*(layer.values for layer in panel.areas), strict=True)]
    return max([*stacked, *(value for layer in panel.lines for value in layer.values)], default=0.0)


def _stairs(values: Sequence[float], axis: Axis, scale: Axis, bottom: float) -> list[str]:
    """Points of a line that is level within a bin; level stretches are two points."""
    points: list[str] = []
    width = axis.size / BINS
    for i, value in enumerate(values):
        level = f"{bottom - scale.at(value):.1f}"
        if i and points[-1].endswith(f" {level}"):
            points.pop()
        else:
            points.append(f"{axis.left + i * width:.1f} {level}")
        points.append(f"{axis.left + (i + 1) * width:.1f} {level}")
    return points


def _area(base: Sequence[float], tops: Sequence[float], axis: Axis, scale: Axis, bottom: float) -> str:
    there, back = (_stairs(values, axis, scale, bottom) for values in (tops, base))
    return "M" + "L".join([*there, *reversed(back)]) + "Z"


def services(panels: Sequence[tuple[str, dict[str, list[float]], str]], axis: Axis) -> str:
    """Service of each tenant over time, in BINS bins; the loudest tenant stands out."""
    height = 110.0
    most = max((max(values) for _, lines, _ in panels for values in lines.values()), default=1.0) or 1.0
    scale, y = Axis(most, 0.0, height), 26.0
    parts, top = [_text(4, 14, "thick: the tenant with most work; thin: each of the others", "soft")], y
    for name, lines, loudest in panels:
        parts.append(_text(4, y + height / 2 + 4, name, "title"))
        for tick in scale.ticks(3):
            level = y + height - scale.at(tick)
            parts.append(f'<path class="grid" d="M{axis.left} {level:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LABELS - 5, level + 4, _short(tick), "soft", "end"))
        for tenant, values in sorted(lines.items(), key=lambda pair: pair[0] == loudest):
            kind = "loud" if tenant == loudest else "quiet"
            path = "L".join(_stairs(values, axis, scale, y + height))
            title = f"<title>{escape(tenant or 'no name')}</title>"
            parts.append(f'<path class="{kind}" d="M{path}">{title}</path>')
        y += height + GAP
    return _svg("service of tenants", y - GAP + FOOT, _time(axis, top, y - GAP + 2) + parts)


# -- ranges and bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """A bar to p50, lines to p90 and p99."""

    name: str
    p50: float
    p90: float
    p99: float


def ranges(title: str, rows: Sequence[Range], unit: str) -> str:
    """Latencies of all runs side by side: shorter is better."""
    known = [row for row in rows if row.p99 == row.p99]  # without those that have no such figure
    axis = Axis(max((row.p99 for row in known), default=1.0) or 1.0)
    height = 20.0 * len(known)
    parts = [_text(4, 14, f"{title}, {unit}: bar to p50, thin line to p90, tick at p99", "title")]
    for tick in axis.ticks():
        parts.append(f'<path class="grid" d="M{axis.at(tick):.1f} 22V{24 + height:.1f}"/>')
        parts.append(_text(axis.at(tick), 24 + height + 13, f"{tick:,g}", "soft", "middle"))
    for number, row in enumerate(known):
        y = 24 + 20.0 * number
        p50, p90, p99 = (axis.at(value) for value in (row.p50, row.p90, row.p99))
        parts.append(_text(4, y + 14, row.name))
        parts.append(
            f'<rect class="decode" x="{axis.left}" y="{y + 4}" width="{p50 - axis.left:.1f}" height="12"/>'
        )
        parts.append(f'<path class="line" d="M{p50:.1f} {y + 10}H{p90:.1f}"/>')
        parts.append(f'<path class="dashed" d="M{p90:.1f} {y + 10}H{p99:.1f}"/>')
        parts.append(f'<path class="line" d="M{p99:.1f} {y + 5}v10"/>')
        parts.append(
            _text(p99 + 5, y + 14, f"{row.p99:,.0f}" if row.p99 >= 100 else f"{row.p99:.3g}", "soft")
        )
    return _svg(title, 24 + height + 22, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], mark: tuple[float, str] | None) -> str:
    """Longer is better. rows: name, value, what stands behind it; mark: a dashed line and what it is."""
    axis = Axis(max([*(value for _, value, _ in rows), mark[0] if mark else 0.0]) * 1.12 or 1.0)
    height = 22.0 * len(rows)
    parts = [_text(4, 14, title, "title")]
    for number, (name, value, words) in enumerate(rows):
        y = 24 + 22.0 * number
        parts.append(_text(4, y + 15, name))
        width = axis.at(value) - axis.left
        parts.append(f'<rect class="decode" x="{axis.left}" y="{y + 3}" width="{width:.1f}" height="16"/>')
        parts.append(_text(axis.at(value) + 6, y + 15, words))
    if mark:
        x = axis.at(mark[0])
        parts.append(f'<path class="dashed" d="M{x:.1f} 20V{28 + height:.1f}"/>')
        parts.append(_text(x, height + 41, mark[1], "soft", "middle" if x < WIDTH - 240 else "end"))
    return _svg(title, 24 + height + 24, parts)
