"""The pictures of a comparison: which sequence was in each step, and which series are drawn in
which order.

Owns the choice of what is drawn. Marks and axes are in charts.py, the words around pictures in
comparison_page.py. Every picture is drawn for a width, of a desktop or of a phone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pageturner.lab.compare.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.compare.run_timeline import RunTimeline, SlotSpan
from pageturner.lab.reporting import charts
from pageturner.lab.reporting.charts import (
    COLOURS,
    FOOT,
    GAP,
    NAME,
    RIGHT,
    WIDE,
    Axis,
    Bar,
    BarChart,
    ChartSeries,
    Panel,
    time_axis,
)

WORDS = json.loads(Path(__file__).with_name("comparison.json").read_bytes())
KINDS = ("padding", "stalled", "prefill", "decode")  # in the order in which they are drawn
MEANING = {
    "prefill": "its prompt is computed",
    "decode": "a token of its answer in each step",
    "stalled": "it is in no step: others' prompts are computed",
    "padding": "it has ended; its row is computed all the same",
}


# -- which sequence was in each step ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GanttHints:
    """The facts about requests that their run does not tell. colours: the number of each tenant's
    colour; texts: the beginnings of prompt and answer by request."""

    colours: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[int, tuple[str, str]] = field(default_factory=dict)


def gantt(found: ComparisonResults, width: float = WIDE) -> str:
    """Draw which sequence was in each step; blocks have the colour of their tenant where there are
    several."""
    runs = [(contest.name, contest.timeline) for contest in found.contests]
    hints = GanttHints(_colours(found.contests), found.texts)
    return slots(runs, time_axis([found.drawn_seconds], width), hints)


def stalls(found: ComparisonResults, width: float = WIDE) -> str:
    """Draw the same for long prompts among running answers."""
    runs = [(contest.name, contest.timeline) for contest in found.stalls]
    return slots(runs, time_axis([timeline.seconds for _, timeline in runs], width), GanttHints())


def _colours(contests: Sequence[ContenderResult]) -> dict[str, int]:
    """Return a number for each tenant, the loudest one first; {} for a single tenant. With more
    tenants than colours, all colours but the first are used again."""
    known = next((c for c in contests if "tenants" in c.figures), None)
    if known is None:
        return {}
    loudest = known.figures["tenants"]["loudest"]
    others = sorted({request.tenant for request in known.timeline.requests.values()} - {loudest})
    return {loudest: 0} | {tenant: 1 + i % (len(COLOURS) - 1) for i, tenant in enumerate(others)}


def slots(runs: Sequence[tuple[str, RunTimeline]], axis: Axis, hints: GanttHints) -> str:
    """Draw a panel for each run, with a line for each slot of the batch: what its sequence did in
    each step."""
    row = min(9.0, max(2.5, 150 / max(timeline.slots for _, timeline in runs)))
    kinds = {span.kind for _, timeline in runs for span in timeline.spans}
    parts, top = charts.legend(_legend(kinds, hints), axis.end + RIGHT)
    y = top
    for name, timeline in runs:
        height = row * timeline.slots
        width = axis.at(timeline.seconds) - axis.begin
        words = f"{name}: {timeline.seconds:.1f} s"
        if timeline.seconds > axis.high:
            words += f", of which the first {axis.high:.1f} s are drawn"
        parts.append(charts.text(4, y + 11, words, "title"))
        y += NAME
        frame = f'x="{axis.begin:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="frame" {frame}/>')
        by_request: dict[int, list[SlotSpan]] = {}
        for span in timeline.spans:
            if span.begin >= axis.high:
                continue
            by_request.setdefault(span.id, []).append(span)
        for id, spans in by_request.items():
            tenant = timeline.requests[id].tenant if id in timeline.requests else ""
            parts.append(f"<g><title>{escape(_hint(timeline, id, spans, hints))}</title>")
            for kind in KINDS:
                boxes = "".join(_boxes(spans, kind, axis, y, row))
                if boxes:
                    colour = _class(kind, hints.colours.get(tenant))
                    parts.append(f'<path class="{colour}" d="{boxes}"/>')
            parts.append("</g>")
        y += height + GAP
    bottom = y - GAP + 2
    parts = charts.grid(axis, top, bottom, "s") + parts
    return charts.svg("who was in each step", parts, axis.end + RIGHT, bottom + FOOT)


def _legend(kinds: set[str], hints: GanttHints) -> list[tuple[str, str]]:
    meanings = [(kind, f"{kind}: {words}") for kind, words in MEANING.items() if kind in kinds]
    if not hints.colours:
        return meanings
    tenants = [(f"tenant{number}", tenant or "no name") for tenant, number in hints.colours.items()]
    others = [pair for pair in meanings if pair[0] in ("stalled", "padding")]
    return [*tenants, ("tenant0 paler", "paler: its prompt is computed"), *others]


def _class(kind: str, tenant: int | None) -> str:
    if tenant is None or kind not in ("prefill", "decode"):
        return kind
    return f"tenant{tenant} paler" if kind == "prefill" else f"tenant{tenant}"


def _hint(timeline: RunTimeline, id: int, spans: Sequence[SlotSpan], hints: GanttHints) -> str:
    """Return lengths and times of a request, and how its prompt and answer begin."""
    begin = min(span.begin for span in spans)
    end = max((span.end for span in spans if span.kind != "padding"), default=begin)
    lines = [f"request {id}: in the batch from {begin:.2f} to {end:.2f} s"]
    known = timeline.requests.get(id)
    if known is not None:
        lines[0] += f", tenant {known.tenant}" if known.tenant else ""
        prompt, answer = (f": {text}" if text else "" for text in hints.texts.get(id, ("", "")))
        lines.append(f"prompt of {known.prompt:,} tokens{prompt}")
        lines.append(f"answer of {known.answer:,} tokens{answer}")
        if known.first == known.first:
            lines.append(f"time to first token {known.first:.2f} s")
    return "\n".join(lines)


def _boxes(
    spans: Sequence[SlotSpan], kind: str, axis: Axis, top: float, row: float
) -> Iterable[str]:
    """Yield the blocks of a request of one kind; there is a gap of a pixel in front of its first
    block."""
    first = min(span.begin for span in spans)
    for span in spans:
        if span.kind == kind:
            left = axis.at(span.begin) + 0.8 * (span.begin == first)
            width = max(axis.at(span.end) - left, 0.2)
            y = top + row * span.slot + 0.3
            yield f"M{left:.1f} {y:.1f}h{width:.1f}v{row - 0.6:.1f}h-{width:.1f}z"


# -- values over time ------------------------------------------------------------------------------

# picture -> unit, areas, lines; each series: kind of its mark, name, name in
# ComparisonResults.series
PANELS: dict[str, Any] = WORDS["panels"]
SOMETIMES = ("waiting", "for_nobody")  # series that are left out where all of their values are 0


def over_time(picture: str, found: ComparisonResults, width: float = WIDE) -> str:
    """Draw one of PANELS: batch sizes, KV memory, or shares of the machine's limits."""
    about = PANELS[picture]
    each = []
    for contest in found.contests:
        series = found.series(contest, found.drawn_seconds)
        pairs = zip(series["kv_reserved"], series["kv_used"], strict=True)
        series["kv_empty"] = [max(0.0, reserved - used) for reserved, used in pairs]
        areas, lines = (
            [
                ChartSeries(kind, name, series[values])
                for kind, name, values in about[part]
                if values not in SOMETIMES or any(series[values])
            ]
            for part in ("areas", "lines")
        )
        each.append(Panel(contest.name, areas, lines))
    return charts.panels(each, time_axis([found.drawn_seconds], width), about["unit"])


def services(found: ComparisonResults, width: float = WIDE) -> str:
    """Draw what each tenant was served over time; nothing is in it without tenants."""
    each = []
    for contest in found.contests:
        if "tenants" not in contest.figures:
            continue
        loudest = contest.figures["tenants"]["loudest"]
        lines = [
            ChartSeries("quiet", "each of the other tenants", values, tenant or "no name")
            for tenant, values in found.services(contest).items()
            if tenant != loudest
        ]
        most = found.services(contest)[loudest]
        lines.append(ChartSeries("loud", "the tenant with most work", most, loudest or "no name"))
        each.append(Panel(contest.name, [], lines))
    return charts.panels(each, time_axis([found.drawn_seconds], width), "tokens", height=110)


# -- bars ------------------------------------------------------------------------------------------

LATENCIES = (
    ("Time to first token", "ttft_ms", "ms"),
    ("Mean time of a token after the first", "tpot_ms", "ms"),
    ("Whole answer", "e2e_s", "s"),
)


def latency(found: ComparisonResults, width: float = WIDE) -> str:
    """Draw three pictures: latencies of all contenders side by side."""
    drawn = []
    for title, name, unit in LATENCIES:
        rows = []
        for contest in found.contests:
            p50, p90, p99 = (contest.figures[name][q] for q in ("p50", "p90", "p99"))
            if p99 == p99:
                end = f"{p99:,.0f}" if p99 >= 100 else f"{p99:.3g}"
                rows.append(Bar(contest.name, p50, (p90, p99), end))
        about = f"{title}, {unit}: bar to p50, thin line to p90, tick at p99"
        drawn.append(charts.bars(BarChart(about, unit, rows), width))
    return "\n".join(drawn)


def throughput(found: ComparisonResults, width: float = WIDE) -> str:
    """Draw output tokens a second, beside what the lengths allow."""
    static = next((c for c in found.contests if c.policy == "static"), None)
    base = float(static.figures["output_tokens_per_s"]) if static else 0.0
    rows = []
    for contest in found.contests:
        speed = float(contest.figures["output_tokens_per_s"])
        words = f"{contest.name}: {speed:,.1f}"
        if base and contest is not static:
            words += f" = {speed / base:.2f}x static"
        if len(contest.rounds) > 1:
            words += f" ({min(contest.rounds):,.1f} to {max(contest.rounds):,.1f})"
        rows.append(Bar(words, speed))
    mark = None
    if static:
        allowed = found.ideal["rows"]
        words = f"static x {allowed:.2f}: no row computed for nobody, all rows as fast"
        mark = (base * allowed, words)
    return charts.bars(BarChart("Output tokens per second", "tokens/s", rows, mark), width)
