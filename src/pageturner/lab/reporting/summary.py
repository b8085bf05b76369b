"""Percentiles, columns, tables and files of measured figures. Must not know how anything was
measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pageturner.engine.machine_limits import GET
from pageturner.private_files import write_json as write_json
from pageturner.telemetry.work import MachineLimits, WorkTotals

PERCENTILES = (50, 90, 99)
SPREAD = ("mean", "p50", "p90", "p99", "max")


class Column(msgspec.Struct, frozen=True, array_like=True):
    """A figure as reports show it. path: where it stands in the figures, names with dots between;
    form: how its number is written; sign: 1 where the least is best, -1 where the most is, 0 where
    neither."""

    head: str
    path: str
    form: str = "{}"
    sign: int = 0

    def of(self, figures: Mapping[str, Any]) -> Any:
        return figure_at(figures, self.path)

    def text(self, figures: Mapping[str, Any]) -> str:
        value = self.of(figures)
        return self.form.format(value) if value == value else "-"


_TABLES = Path(__file__).with_name("columns.json").read_bytes()
COLUMNS = msgspec.json.decode(_TABLES, type=dict[str, tuple[Column, ...]])


def figure_at(figures: Mapping[str, Any], path: str) -> Any:
    """Return the figure at this path; nan where there is none."""
    found: Any = figures
    for name in path.split("."):
        if name not in found:
            return math.nan
        found = found[name]
    return found


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks, as numpy's default. nan for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99 and max."""
    figures = {f"p{q}": percentile(values, q) for q in PERCENTILES}
    mean = sum(values) / len(values) if values else math.nan
    return {"mean": mean, **figures, "max": max(values, default=math.nan)}


def share_range(count: int, total: int) -> list[float]:
    """Return the least and most that a share is with 95 % certainty, of which `count` of `total`
    draws are a sample (Wilson, 1927)."""
    total = max(total, 1)
    share = count / total
    doubt = 1.96**2 / total
    half = math.sqrt(doubt * (share * (1 - share) + doubt / 4))
    return [(share + doubt / 2 + side) / (1 + doubt) for side in (-half, half)]


def used(usage: WorkTotals, limits: MachineLimits | None) -> str:
    """Describe how much of the machine was used."""
    done, shares = usage.achieved, usage.shares(limits)
    if not done:
        return "used: not counted"
    paces = "{read_gb_s:.1f} GB/s read, {int8_gop_s:.0f} GOP/s of int8, {fp32_gop_s:.0f} of fp32"
    text = f"used: {paces.format(**done)}"
    known = {"compute": "of arithmetic", "read": "of reading", "kernels": "of the time in kernels"}
    text += "; " + ", ".join(
        f"{shares[name]:.0%} {what}" for name, what in known.items() if name in shares
    )
    return text if "read" in shares else f"{text}; for shares of this machine {GET}"


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Columns aligned; numbers to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return "\n".join(lines)


def spreads_table(figures: Mapping[str, Any], names: Sequence[str], head: str) -> str:
    """Return a table with a row for each of these spreads."""
    rows = [[name, *(figures[name][column] for column in SPREAD)] for name in names]
    return table(rows, (head, *SPREAD))


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
