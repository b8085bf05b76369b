"""Pictures of runs, as SVG: who was in each step, series over time, ranges of latency. Standard library only.

Owns marks, axes and colours. Must not know how a figure was made. All pictures of one report share the
axis of time, so that lengths compare. Names stand above what they name, so that a picture may be as narrow
as a phone. Colours follow what the viewer prefers, light or dark; kinds of marks
differ in lightness too, and padding is hatched, so that nothing hangs on hue alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from pageturner.lab.compare.run_timeline import RunTimeline, SlotSpan

WIDE, NARROW = 1000, 360  # pictures on a desk and on a phone
LEFT, RIGHT, FOOT, GAP = 34, 14, 22, 10
NAME = 18  # above each row of a picture
LETTER = 5.9  # about the width of one
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
    tenants = TENANTS if "tenant0" in rest else ""
    return f'{opening}><style>{STYLE}{tenants}</style><rect class="page" width="100%" height="100%"/>{rest}'


@dataclass(frozen=True, slots=True)
class Axis:
    """0 to `most` on so many pixels from `left` on."""

    most: float
    left: float = LEFT
    size: float = WIDE - LEFT - RIGHT

    @property
    def width(self) -> float:
        """Of the whole picture."""
        return self.left + self.size + RIGHT

    def at(self, value: float) -> float:
        return self.left + self.size * min(max(value / self.most, 0.0), 1.0)

    def ticks(self, about: int = 6) -> list[float]:
        """Round numbers, about so many."""
        rough = self.most / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
        return [step * i for i in range(int(self.most / step + 1e-9) + 1)]


def time_axis(seconds: Iterable[float], width: float = WIDE) -> Axis:
    """The common one, of a picture of this width."""
    return Axis(max([*seconds, 1e-6]), LEFT, width - LEFT - RIGHT)


def _svg(label: str, height: float, parts: Iterable[str], width: float) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([opening, HATCH, *parts, "</svg>"])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    about = f' class="{kind}"' if kind else ""
    return f'<text{about} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _lines(y: float, text: str, kind: str, width: float) -> list[str]:
    """A text in as many lines as the width wants."""
    lines = textwrap.wrap(text, max(20, int((width - 8) / LETTER)))
    return [_text(4, y + 15 * number, line, kind) for number, line in enumerate(lines)]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _about(axis: Axis) -> int:
    """How many numbers an axis has room for."""
    return 6 if axis.size > 500 else 5


def _grid(axis: Axis, top: float, bottom: float, unit: str) -> list[str]:
    """Lines, and numbers below; the last one has the unit."""
    parts, ticks = [], axis.ticks(_about(axis))
    for tick in ticks:
        x = axis.at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        last = tick == ticks[-1]
        end = last and axis.width - x < 24
        text = f"{tick:,g} {unit}" if last else f"{tick:,g}"
        parts.append(
            _text(
                axis.width - 2 if end else x, bottom + 14, text, "soft", "end" if end else "middle"
            )
        )
    return parts


def _levels(scale: Axis, axis: Axis, bottom: float) -> list[str]:
    """Lines of a panel, and what they stand for to the left."""
    parts = []
    for tick in scale.ticks(3):
        level = bottom - scale.at(tick)
        parts.append(
            f'<path class="grid" d="M{axis.left:.1f} {level:.1f}H{axis.left + axis.size:.1f}"/>'
        )
        parts.append(_text(axis.left - 4, level + 4, _short(tick), "soft", "end"))
    return parts


def _legend(kinds: Sequence[tuple[str, str]], width: float) -> tuple[list[str], float]:
    """Swatches and words, in as many lines as they need; where the next thing may begin."""
    parts, x, y = [], 4.0, 14.0
    for kind, text in kinds:
        size = 34 + LETTER * len(text)
        if x + size > width and x > 4:
            x, y = 4.0, y + 17
        if kind == "dashed":
            parts.append(f'<path class="dashed" d="M{x:.1f} {y - 4:.1f}h16"/>')
        else:
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y - 10:.1f}" width="14" height="11"/>'
            )
        parts.append(_text(x + 19, y, text, "soft"))
        x += size
    return parts, y + 12


# -- who was in each step ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GanttHints:
    """What is known of requests beside their run. colours: of a tenant, a number; texts: by request, the
    beginnings of its prompt and answer."""

    colours: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[int, tuple[str, str]] = field(default_factory=dict)


NO_HINTS = GanttHints()


def gantt(runs: Sequence[tuple[str, RunTimeline]], axis: Axis, hints: GanttHints = NO_HINTS) -> str:
    """A panel for each run, a line for each place in the batch: what its sequence did in each step."""
    row = min(9.0, max(2.5, 150 / max(told.slots for _, told in runs)))
    kinds = [
        kind for kind in MEANING if any(s.kind == kind for _, told in runs for s in told.spans)
    ]
    parts, top = _legend(_gantt_legend(kinds, hints), axis.width)
    y = top
    for name, told in runs:
        height = row * told.slots
        end = axis.at(told.seconds)
        parts.append(_text(4, y + 11, f"{name}: {told.seconds:.1f} s", "title"))
        y += NAME
        parts.append(
            f'<rect class="frame" x="{axis.left:.1f}" y="{y:.1f}" width="{end - axis.left:.1f}"'
            f' height="{height:.1f}"/>'
        )
        parts += _sequences(told, axis, (y, row), hints)
        y += height + GAP
    bottom = y - GAP + 2
    return _svg(
        "who was in each step", bottom + FOOT, _grid(axis, top, bottom, "s") + parts, axis.width
    )


def _gantt_legend(kinds: Sequence[str], hints: GanttHints) -> list[tuple[str, str]]:
    if not hints.colours:
        return [(kind, f"{kind}: {MEANING[kind]}") for kind in kinds]
    tenants = [(f"tenant{number}", tenant or "no name") for tenant, number in hints.colours.items()]
    others = [kind for kind in kinds if kind in ("stalled", "padding")]
    told = [(kind, f"{kind}: {MEANING[kind]}") for kind in others]
    return [*tenants, ("tenant0 paler", "paler: its prompt is computed"), *told]


def _sequences(
    told: RunTimeline, axis: Axis, place: tuple[float, float], hints: GanttHints
) -> list[str]:
    """One group for each request, with what is known of it as a hint; a gap of a pixel in front of it."""
    by_id: dict[int, list[SlotSpan]] = {}
    for span in told.spans:
        by_id.setdefault(span.id, []).append(span)
    parts = []
    for id, mine in by_id.items():
        first = min(span.begin for span in mine)
        parts.append(f"<g><title>{escape(_hint(told, id, mine, hints))}</title>")
        colour = hints.colours.get(told.requests[id].tenant) if id in told.requests else None
        for kind in KINDS:
            path = "".join(_box(span, axis, *place, first) for span in mine if span.kind == kind)
            if path:
                parts.append(f'<path class="{_colour(kind, colour)}" d="{path}"/>')
        parts.append("</g>")
    return parts


def _colour(kind: str, tenant: int | None) -> str:
    if tenant is None or kind not in ("prefill", "decode"):
        return kind
    return f"tenant{tenant}" + (" paler" if kind == "prefill" else "")


def _hint(told: RunTimeline, id: int, spans: Sequence[SlotSpan], hints: GanttHints) -> str:
    """Lengths and times of a request, and how its prompt and answer begin."""
    begin = min(span.begin for span in spans)
    end = max((span.end for span in spans if span.kind != "padding"), default=begin)
    lines, known = (
        [f"request {id}: in the batch from {begin:.2f} to {end:.2f} s"],
        told.requests.get(id),
    )
    if known is not None:
        lines[0] += f", tenant {known.tenant}" if known.tenant else ""
        prompt, answer = (f": {text}" if text else "" for text in hints.texts.get(id, ("", "")))
        lines.append(f"prompt of {known.prompt:,} tokens{prompt}")
        lines.append(f"answer of {known.answer:,} tokens{answer}")
        lines += [f"time to first token {known.first:.2f} s"] if known.first == known.first else []
    return "\n".join(lines)


def _box(span: SlotSpan, axis: Axis, top: float, row: float, first: float) -> str:
    left = axis.at(span.begin) + (0.8 if span.begin == first else 0.0)
    width = max(axis.at(span.end) - left, 0.2)
    return (
        f"M{left:.1f} {top + row * span.slot + 0.3:.1f}h{width:.1f}v{row - 0.6:.1f}h-{width:.1f}z"
    )


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
    parts, top = _legend(list(named.items()), axis.width)
    y, scale = top, Axis(most, 0.0, height)
    for panel in panels:
        parts.append(_text(4, y + 11, panel.name, "title"))
        parts.append(_text(axis.width - 4, y + 11, unit, "soft", "end"))
        y += NAME
        parts += _levels(scale, axis, y + height)
        base = [0.0] * BINS
        for layer in panel.areas:
            tops = [a + b for a, b in zip(base, layer.values, strict=True)]
            parts.append(
                f'<path class="{layer.kind}" d="{_area(base, tops, axis, scale, y + height)}"/>'
            )
            base = tops
        for layer in panel.lines:
            last = max((i for i, value in enumerate(layer.values) if value), default=0)
            path = "L".join(_stairs(layer.values[: last + 1], axis, scale, y + height))
            parts.append(f'<path class="{layer.kind}" d="M{path}"/>')
        y += height + GAP
    bottom = y - GAP + 2
    return _svg(unit, bottom + FOOT, _grid(axis, top, bottom, "s") + parts, axis.width)


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


def _area(
    base: Sequence[float], tops: Sequence[float], axis: Axis, scale: Axis, bottom: float
) -> str:
    there, back = (_stairs(values, axis, scale, bottom) for values in (tops, base))
    return "M" + "L".join([*there, *reversed(back)]) + "Z"


def services(panels: Sequence[tuple[str, dict[str, list[float]], str]], axis: Axis) -> str:
    """Service of each tenant over time, in BINS bins; the loudest tenant stands out."""
    height = 110.0
    most = (
        max((max(values) for _, lines, _ in panels for values in lines.values()), default=1.0)
        or 1.0
    )
    scale, y = Axis(most, 0.0, height), 26.0
    parts, top = (
        [_text(4, 14, "thick: the tenant with most work; thin: each of the others", "soft")],
        y,
    )
    for name, lines, loudest in panels:
        parts.append(_text(4, y + 11, name, "title"))
        parts.append(_text(axis.width - 4, y + 11, "tokens", "soft", "end"))
        y += NAME
        parts += _levels(scale, axis, y + height)
        for tenant, values in sorted(lines.items(), key=lambda pair: pair[0] == loudest):
            kind = "loud" if tenant == loudest else "quiet"
            path = "L".join(_stairs(values, axis, scale, y + height))
            title = f"<title>{escape(tenant or 'no name')}</title>"
            parts.append(f'<path class="{kind}" d="M{path}">{title}</path>')
        y += height + GAP
    bottom = y - GAP + 2
    parts = _grid(axis, top, bottom, "s") + parts
    return _svg("service of tenants", bottom + FOOT, parts, axis.width)


# -- ranges and bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """A bar to p50, lines to p90 and p99."""

    name: str
    p50: float
    p90: float
    p99: float


BAR = 36.0  # of a row with its name above


def ranges(title: str, rows: Sequence[Range], unit: str, width: float = WIDE) -> str:
    """Latencies of all runs side by side: shorter is better."""
    known = [row for row in rows if row.p99 == row.p99]  # without those that have no such figure
    axis = Axis(max((row.p99 for row in known), default=1.0) or 1.0, 4.0, width - 70)
    parts = _lines(
        14, f"{title}, {unit}: bar to p50, thin line to p90, tick at p99", "title", width
    )
    top = 10 + 15.0 * len(parts)
    bottom = top + BAR * len(known)
    for number, row in enumerate(known):
        y = top + BAR * number
        p50, p90, p99 = (axis.at(value) for value in (row.p50, row.p90, row.p99))
        parts.append(_text(4, y + 14, row.name))
        y += NAME
        parts.append(
            f'<rect class="decode" x="{axis.left}" y="{y + 2}" width="{p50 - axis.left:.1f}" height="12"/>'
        )
        parts.append(f'<path class="line" d="M{p50:.1f} {y + 8}H{p90:.1f}"/>')
        parts.append(f'<path class="dashed" d="M{p90:.1f} {y + 8}H{p99:.1f}"/>')
        parts.append(f'<path class="line" d="M{p99:.1f} {y + 3}v10"/>')
        figure = f"{row.p99:,.0f}" if row.p99 >= 100 else f"{row.p99:.3g}"
        parts.append(_text(p99 + 5, y + 12, figure, "soft"))
    return _svg(title, bottom + FOOT, _grid(axis, top, bottom + 2, unit) + parts, width)


def bars(
    title: str,
    rows: Sequence[tuple[str, float, str]],
    mark: tuple[float, str] | None,
    width: float = WIDE,
) -> str:
    """Longer is better. rows: name, value, what stands behind it; mark: a dashed line and what it is."""
    most = max([*(value for _, value, _ in rows), mark[0] if mark else 0.0]) or 1.0
    axis = Axis(most * 1.02, 4.0, width - 8)
    parts, bottom = [_text(4, 14, title, "title")], 24 + BAR * len(rows)
    for number, (name, value, words) in enumerate(rows):
        y = 24 + BAR * number
        parts.append(_text(4, y + 14, f"{name}: {words}"))
        length = axis.at(value) - axis.left
        parts.append(
            f'<rect class="decode" x="{axis.left}" y="{y + NAME}" width="{length:.1f}" height="14"/>'
        )
    below: list[str] = []
    if mark:
        parts.append(f'<path class="dashed" d="M{axis.at(mark[0]):.1f} 24V{bottom:.1f}"/>')
        below = _lines(bottom + 15, f"dashed: {mark[1]}", "soft", width)
    return _svg(title, bottom + 8 + 15 * len(below), parts + below, width)
