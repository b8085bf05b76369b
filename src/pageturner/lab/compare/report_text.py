"""A comparison on a terminal: what to choose first, then five figures a row.

Owns the tables. Sentences are in report_words.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.lab.compare import report_words
from pageturner.lab.compare.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.reporting import summary

HEAD = ("", "tokens/s", "TTFT p99 ms", "TPOT p50 ms", "longest gap ms", "e2e p99 s")
MORE = ("", "TTFT p50 ms", "e2e p50 s", "steps", "padding", "arithmetic", "bandwidth", "preempted")


def render(found: ComparisonResults, *, every: bool = False) -> str:
    """Disturbances, a row for each contender, what to choose. every: also the figures that are folded on the
    page, and those that were reckoned."""
    parts = [" ".join(report_words.disturbed(found))] if found.disturbed else []
    parts.append(summary.table(_five(found.contests), HEAD))
    if every:
        parts.append(summary.table(_more(found.contests), MORE))
    if every and found.reckoned:
        parts.append("reckoned:\n" + summary.table(_five(found.reckoned), HEAD))
    if every and found.stalls:
        told = "long prompts among running answers, simulated:"
        parts.append(f"{told}\n{summary.table(_five(found.stalls), HEAD)}")
    if len(found.contests) > 1:
        parts.append(_advice(found))
    return "\n\n".join([*parts, "\n".join(report_words.verdict(found))])


def _five(contests: Sequence[ContenderResult]) -> list[list[object]]:
    return [
        [
            c.name,
            f"{f['output_tokens_per_s']:,.1f}",
            f"{f['ttft_ms']['p99']:,.0f}",
            f"{f['tpot_ms']['p50']:,.1f}",
            f"{f['itl_ms']['max']:,.0f}",
            f["e2e_s"]["p99"],
        ]
        for c, f in ((c, c.figures) for c in contests)
    ]


def _more(contests: Sequence[ContenderResult]) -> list[list[object]]:
    return [
        [
            c.name,
            f"{f['ttft_ms']['p50']:,.0f}",
            f["e2e_s"]["p50"],
            f["steps"],
            f"{f['padding_share']:.0%}",
            *(_share(f["machine"].get(name)) for name in ("compute_share", "read_share")),
            f["preemptions"],
        ]
        for c, f in ((c, c.figures) for c in contests)
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _advice(found: ComparisonResults) -> str:
    lines = []
    for one in found.advice():
        measured = (
            f"; measured {'' if one.agrees else 'otherwise: '}{one.measured}"
            if one.measured
            else ""
        )
        lines.append(f"{one.want}:\n    {one.chosen} ({one.figure}){measured}")
    return "\n".join(lines)
