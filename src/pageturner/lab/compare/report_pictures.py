"""The pictures of a comparison: which series are drawn, in what order, and what a hint says.

Owns the choice. Marks and axes are in svg_charts.py, words around pictures in report_html.py. Every picture
is drawn for a width: that of a desk, or that of a phone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.lab.compare import svg_charts
from pageturner.lab.compare.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.compare.svg_charts import COLOURS, WIDE, ChartSeries, GanttHints, Panel, Range


def gantt(found: ComparisonResults, width: float = WIDE) -> str:
    """Who was in each step; blocks have the colour of their tenant where there are several."""
    runs = [(contest.name, contest.timeline) for contest in found.contests]
    hints = GanttHints(_colours(found.contests), found.texts)
    return svg_charts.gantt(runs, svg_charts.time_axis([found.seconds], width), hints)


def stalls(found: ComparisonResults, width: float = WIDE) -> str:
    """The same of long prompts among running answers."""
    runs = [(contest.name, contest.timeline) for contest in found.stalls]
    return svg_charts.gantt(runs, svg_charts.time_axis([told.seconds for _, told in runs], width))


def _colours(contests: Sequence[ContenderResult]) -> dict[str, int]:
    """A number for each tenant, the loudest one first; none where there is only one. Colours come again when
    there are more tenants than colours, but for the first."""
    known = next((c for c in contests if "tenants" in c.figures), None)
    if known is None:
        return {}
    loudest = known.figures["tenants"]["loudest"]
    others = sorted({one.tenant for one in known.timeline.requests.values()} - {loudest})
    return {loudest: 0} | {tenant: 1 + i % (len(COLOURS) - 1) for i, tenant in enumerate(others)}


def batch(found: ComparisonResults, width: float = WIDE) -> str:
    """Batch sizes."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        layers = [
            ChartSeries("decode", "sequences that decode", series["decoding"]),
            ChartSeries("prefill", "whose prompts are computed", series["prefilling"]),
            ChartSeries("padding", "ended, computed all the same", series["padding"]),
        ]
        waiting = (
            [ChartSeries("dashed", "waiting", series["waiting"])] if any(series["waiting"]) else []
        )
        panels.append(Panel(contest.name, layers, waiting))
    return svg_charts.areas(panels, svg_charts.time_axis([found.seconds], width), "sequences")


def memory(found: ComparisonResults, width: float = WIDE) -> str:
    """KV memory."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        pairs = zip(series["kv_reserved"], series["kv_used"], strict=True)
        layers = [
            ChartSeries("used", "tokens with KV", series["kv_used"]),
            ChartSeries("waste", "empty, in blocks in use", [max(0.0, r - u) for r, u in pairs]),
        ]
        whole = ChartSeries("dashed", "prompt and max_tokens of all who run", series["kv_whole"])
        panels.append(Panel(contest.name, layers, [whole]))
    return svg_charts.areas(
        panels, svg_charts.time_axis([found.seconds], width), "tokens of KV memory"
    )


def machine(found: ComparisonResults, width: float = WIDE) -> str:
    """Shares of the machine's limits."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        areas = [ChartSeries("used", "arithmetic: products of int8 and fp32", series["useful"])]
        if any(series["for_nobody"]):
            areas.append(ChartSeries("padding", "for padding", series["for_nobody"]))
        panels.append(
            Panel(contest.name, areas, [ChartSeries("dashed", "reading", series["read"])])
        )
    return svg_charts.areas(
        panels, svg_charts.time_axis([found.seconds], width), "% of the machine's limits"
    )


LATENCIES = (
    ("Time to first token", "ttft_ms", "ms"),
    ("Mean time of a token after the first", "tpot_ms", "ms"),
    ("Whole answer", "e2e_s", "s"),
)


def latency(found: ComparisonResults, width: float = WIDE) -> list[str]:
    """Three pictures."""
    return [
        svg_charts.ranges(
            title,
            [
                Range(c.name, *(c.figures[name][q] for q in ("p50", "p90", "p99")))
                for c in found.contests
            ],
            unit,
            width,
        )
        for title, name, unit in LATENCIES
    ]


def services(found: ComparisonResults, width: float = WIDE) -> str:
    """What each tenant was served; nothing in it without tenants."""
    each = [c for c in found.contests if "tenants" in c.figures]
    panels = [(c.name, found.services(c), c.figures["tenants"]["loudest"]) for c in each]
    return svg_charts.services(panels, svg_charts.time_axis([found.seconds], width))


def throughput(found: ComparisonResults, width: float = WIDE) -> str:
    """Output tokens a second, beside what the lengths allow."""
    static = next((c for c in found.contests if c.policy == "static"), None)
    base = float(static.figures["output_tokens_per_s"]) if static else 0.0
    rows = []
    for contest in found.contests:
        speed = float(contest.figures["output_tokens_per_s"])
        words = f"{speed:,.1f}" + (
            f" = {speed / base:.2f}x static" if base and contest is not static else ""
        )
        if len(contest.rounds) > 1:
            words += f" ({min(contest.rounds):,.1f} to {max(contest.rounds):,.1f})"
        rows.append((contest.name, speed, words))
    mark = None
    if static:
        allowed = found.ideal["rows"]
        mark = (
            base * allowed,
            f"static x {allowed:.2f}: no row computed for nobody, all rows as fast",
        )
    return svg_charts.bars("Output tokens per second", rows, mark, width)
