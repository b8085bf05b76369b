"""From pairs of measurements to medians, ratios, a table and a picture. Standard library only.

Owns which figures a workload is judged by. Must not know how anything was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Figures = dict[str, Any]

# name -> (path in the figures, unit, whether more is better)
METRICS: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "output": (("output_tokens_per_s",), "tok/s", True),
    "TTFT p50": (("ttft_ms", "p50"), "ms", False),
    "TTFT p99": (("ttft_ms", "p99"), "ms", False),
    "TPOT p50": (("tpot_ms", "p50"), "ms", False),
}
# what the picture shows of each workload; the first is what decides
JUDGED = {
    "mixed64": ("output",),
    "poisson": ("TTFT p50", "TTFT p99", "TPOT p50"),
    "prefix": ("output",),
    "single": ("output", "TPOT p50"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours and a peer's figures of one workload, measured right after each other."""

    workload: str
    peer: str
    ours: Figures
    theirs: Figures


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians over the pairs. `ratio`: median of the pairs' ratios, above 1 where ours is better."""

    ours: float
    theirs: float
    ratio: float
    spread: tuple[float, float]


def value(figures: Figures, metric: str) -> float:
    found: Any = figures
    for key in METRICS[metric][0]:
        found = found[key]
    return float(found)


def cell(pairs: Sequence[Pair], metric: str) -> Cell:
    """One metric over the pairs of one workload and one peer."""
    more = METRICS[metric][2]
    ours = [value(pair.ours, metric) for pair in pairs]
    theirs = [value(pair.theirs, metric) for pair in pairs]
    ratios = [a / b if more else b / a for a, b in zip(ours, theirs, strict=True)]
    median = statistics.median
    return Cell(median(ours), median(theirs), median(ratios), (min(ratios), max(ratios)))


def groups(pairs: Sequence[Pair]) -> dict[tuple[str, str], list[Pair]]:
    """(workload, peer) -> its pairs, in the order of measurement."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        found.setdefault((pair.workload, pair.peer), []).append(pair)
    return found


HEAD = ["workload", "peer", "pairs", *METRICS, "start s", "peak MB"]


def rows(pairs: Sequence[Pair]) -> list[list[str]]:
    """A row for each workload and peer: "ours / theirs = ratio" for every metric."""
    lines = []
    for (workload, peer), mine in groups(pairs).items():
        cells = [cell(mine, metric) for metric in METRICS]
        shown = [f"{_short(c.ours)} / {_short(c.theirs)} = {c.ratio:.2f}x" for c in cells]
        extra = [
            " / ".join(_short(statistics.median(float(f.get(key, float("nan"))) for f in side)) for side in
                       ([p.ours for p in mine], [p.theirs for p in mine]))
            for key in ("started_s", "peak_rss_mb")
        ]  # fmt: skip
        lines.append([workload, peer, str(len(mine)), *shown, *extra])
    return lines


def text(pairs: Sequence[Pair]) -> str:
    """For a terminal."""
    every = [HEAD, *rows(pairs)]
    widths = [max(len(line[i]) for line in every) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in every]
    return "\n".join([*lines, "ours / peer = ratio; above 1 ours is better; medians over the pairs"])


def markdown(pairs: Sequence[Pair]) -> str:
    """For bench/LOG.md."""
    lines = [HEAD, ["--"] * len(HEAD), *rows(pairs)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.1f}"


BAR, GAP, LEFT, WIDTH = 16, 6, 250, 420


def picture(pairs: Sequence[Pair], title: str) -> str:
    """One SVG: a bar for each judged ratio, with its spread, on a logarithmic axis; the line is the peer."""
    bars = [
        (f"{workload} {metric}" if len(JUDGED[workload]) > 1 else workload, peer, cell(mine, metric))
        for (workload, peer), mine in groups(pairs).items()
        for metric in JUDGED[workload]
    ]
    low = min([0.5, *(c.spread[0] for _, _, c in bars)])
    high = max([2.0, *(c.spread[1] for _, _, c in bars)])

    def x(ratio: float) -> float:
        return LEFT + WIDTH * math.log(ratio / low) / math.log(high / low)

    foot = 40 + len(bars) * (BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 70}" height="{foot + 24}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i, (label, peer, c) in enumerate(bars):
        y = 40 + i * (BAR + GAP)
        colour = "#2a7f62" if c.ratio >= 1 else "#b5472f"
        begin, end = sorted((x(1.0), x(c.ratio)))
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)} / {escape(peer)}</text>',
            f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<path d="M{x(c.spread[0]):.1f} {y + BAR / 2}H{x(c.spread[1]):.1f}" stroke="black"/>',
            f'<text x="{max(x(c.spread[1]), end) + 6:.1f}" y="{y + 12}">{c.ratio:.2f}x</text>',
        ]
    parts += [
        f'<path d="M{x(1.0):.1f} 32V{foot}" stroke="#555" stroke-dasharray="4 3"/>',
        f'<text x="{x(1.0):.1f}" y="{foot + 14}" text-anchor="middle">the peer = 1 (log axis)</text>',
        "</svg>",
    ]
    return "\n".join(parts)
