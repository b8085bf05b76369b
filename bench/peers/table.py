"""From pairs of measurements to medians, ratios and a table. Standard library only.

Owns which figures a workload is judged by. Must not know how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]

# name -> (path in the figures, unit, whether more is better)
METRICS: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "output": (("output_tokens_per_s",), "tok/s", True),
    "TTFT p50": (("ttft_ms", "p50"), "ms", False),
    "TTFT p99": (("ttft_ms", "p99"), "ms", False),
    "TPOT p50": (("tpot_ms", "p50"), "ms", False),
}
# what a workload is judged by, and what the picture shows; the first is what decides
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
            " / ".join(
                _short(statistics.median(float(f.get(key, float("nan"))) for f in side))
                for side in ([p.ours for p in mine], [p.theirs for p in mine])
            )
            for key in ("started_s", "peak_rss_mb")
        ]
        lines.append([workload, peer, str(len(mine)), *shown, *extra])
    return lines


def text(pairs: Sequence[Pair]) -> str:
    """For a terminal."""
    every = [HEAD, *rows(pairs)]
    widths = [max(len(line[i]) for line in every) for i in range(len(HEAD))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in every
    ]
    return "\n".join(
        [*lines, "ours / peer = ratio; above 1 ours is better; medians over the pairs"]
    )


def markdown(pairs: Sequence[Pair]) -> str:
    """For bench/LOG.md."""
    lines = [HEAD, ["--"] * len(HEAD), *rows(pairs)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.1f}"
