"""Percentiles, tables and JSON of measured figures. Must not know how anything was measured."""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.engine.machine_limits import GET
from pageturner.private_files import write_json as write_json
from pageturner.telemetry.work import MachineLimits, WorkTotals

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks, as numpy's default. nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99 and max."""
    figures = {f"p{q}": percentile(values, q) for q in PERCENTILES}
    mean = sum(values) / len(values) if values else float("nan")
    return {"mean": mean, **figures, "max": max(values, default=float("nan"))}


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
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    lines = [
        "  ".join(
            name.ljust(w) if i == 0 else name.rjust(w)
            for i, (name, w) in enumerate(zip(head, widths, strict=True))
        )
    ]
    for row in cells:
        lines.append(
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
