"""`pageturner bench kernels`: every operator's time beside what the machine could do, and beside
another run.

Owns timing, shares of the limits, tables and comparison. What is timed is in kernel_cases.py, the
limits come from kernels/peak.py. The share of a case is the least time that its operations and
bytes need, whichever is more, over the time it took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pageturner.config.flag_table import add_flags
from pageturner.errors import bad_setting
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.peak import Peak, measure
from pageturner.lab.bench import kernel_cases
from pageturner.lab.bench.kernel_cases import PARTS, CaseSelection, KernelCase
from pageturner.lab.reporting import summary
from pageturner.lab.reporting.output import write_figures
from pageturner.progress import Progress

Row = dict[str, Any]  # as in the JSON file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "bench kernels")


def main(arguments: argparse.Namespace) -> int:
    other = _read(arguments.against) if arguments.against else None
    ops = NativeOps(arguments.threads, arguments.isa)
    given = _read(arguments.limits)["limits"] if arguments.limits else None
    limits = Peak(**given) if given else measure(ops.isa, ops.threads, seconds=1.5)
    size = kernel_cases.FULL if arguments.full else kernel_cases.SHORT
    rows = timed(ops, size, arguments.only or list(PARTS), limits, arguments.budget)
    figures = {
        "fingerprint": ops.fingerprint,
        "threads": ops.threads,
        "limits": asdict(limits),
        "rungs": rows,
    }
    print(render(figures, other))
    if arguments.json:
        write_figures(arguments.json, figures)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
        return {"limits": figures["limits"], "rungs": figures["rungs"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise bad_setting(f"{path} holds no figures of `bench kernels --json`: {error}") from error


def timed(
    ops: NativeOps, size: CaseSelection, parts: list[str], limits: Peak, budget: float
) -> list[Row]:
    """A row for each case."""
    clock = time.process_time if ops.threads == 1 else time.perf_counter
    rows = []
    with Progress("parts", len(parts)) as line:
        for done, part in enumerate(parts):
            for case in kernel_cases.kernel_cases(ops, size, part):
                rows.append(row_of(case, best(case.call, clock, budget), limits))
                line.update(done, f"{part} {case.name}")
    return rows


def best(call: Callable[[], object], clock: Callable[[], float], budget: float) -> float:
    """Seconds of one call: the least over rounds of about 1 ms, which other processes seldom
    interrupt."""
    call()
    start = clock()
    call()
    n = max(1, int(0.001 / max(clock() - start, 1e-7)))
    least, end = float("inf"), time.perf_counter() + budget
    while least == float("inf") or time.perf_counter() < end:
        start = clock()
        for _ in range(n):
            call()
        least = min(least, (clock() - start) / n)
    return least


def row_of(case: KernelCase, seconds: float, limits: Peak) -> Row:
    """Return the row of a case that was timed: the seconds it took, and the share of the limit that
    binds it; share None where no limit is known."""
    reading = 1e-9 * case.nbytes / limits.read_of(case.nbytes)
    products = {
        "integer": (case.integer, limits.integer_gop_s),
        "float": (case.floats, limits.fp32_gop_s),
    }
    needed = {name: pair for name, pair in products.items() if pair[0]}
    floors = {name: 1e-9 * n / limit for name, (n, limit) in needed.items() if limit is not None}
    compute = sum(floors.values())
    bound = max(floors, key=floors.__getitem__) if compute > reading else "bytes"
    known = len(floors) == len(needed)
    return {
        "part": case.part,
        "name": case.name,
        "kind": case.kind,
        "rows": case.rows,
        "us": 1e6 * seconds,
        "gop_s": 1e-9 * (case.integer + case.floats) / seconds,
        "gb_s": 1e-9 * case.nbytes / seconds,
        "bound": bound,
        "share": max(reading, compute) / seconds if known else None,
    }


def compare(rows: list[Row], other: list[Row]) -> dict[tuple[Any, ...], float]:
    """Case -> how many times faster it is than in the other run, for those that are in both."""
    before = {key(row): row["us"] for row in other}
    return {key(row): before[key(row)] / row["us"] for row in rows if key(row) in before}


def key(row: Row) -> tuple[Any, ...]:
    """Return the fields that two rows of the same case have in common."""
    return row["part"], row["name"], row["kind"], row["rows"]


def render(figures: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """The figures as a table for people; with those of another run, "faster" is its time over
    ours."""
    ratios = compare(figures["rungs"], other["rungs"]) if other else {}
    lines = []
    for row in figures["rungs"]:
        share = "-" if row["share"] is None else f"{row['share']:.0%} {row['bound']}"
        cells = [f"{row['part']} {row['name']}", row["kind"], row["rows"], row["us"]]
        cells += [round(row["gop_s"]), round(row["gb_s"]), share]
        lines.append(
            [*cells, f"{ratios[key(row)]:.2f}x" if key(row) in ratios else "-"][: 8 if other else 7]
        )
    head = ("case", "type", "rows", "us", "GOP/s", "GB/s", "of the limit", "faster")[
        : 8 if other else 7
    ]
    return "\n".join([summary.table(lines, head), limits_text(figures), *_gain(ratios)])


def limits_text(figures: dict[str, Any]) -> str:
    """The limits that the shares are of, in a sentence."""
    peak = figures["limits"]
    read = ", ".join(f"{value:.0f} ({where})" for where, value in peak["read_gb_s"].items())
    known = [
        f"{peak[name]:.0f} {unit}"
        for name, unit in (("integer_gop_s", "GOP/s of int8"), ("fp32_gop_s", "GFLOP/s"))
        if peak[name]
    ]
    return (
        f"limits of {figures['threads']} threads: {', '.join([*known, f'reading {read} GB/s'])};"
        f" {figures['fingerprint']}"
    )


def _gain(ratios: dict[tuple[Any, ...], float]) -> list[str]:
    """The geometric mean of each part."""
    parts = dict.fromkeys(k[0] for k in ratios)
    means = {
        p: statistics.geometric_mean([r for k, r in ratios.items() if k[0] == p]) for p in parts
    }
    return (
        [f"faster, geometric means: {', '.join(f'{p} {r:.2f}x' for p, r in means.items())}"]
        if means
        else []
    )


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="pageturner bench kernels")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
