"""What other scripts find out, shown among the lines of the house: earlier acceptance, counts, time of CI.

Owns which of their parts count here and how their lines are read. Must not know how they find what they say.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import house_base
from harness import ROOT, Line, NotRun
from house_base import Side

PARTS = {
    "talk": ("right", "alive"),
    "models": ("tokenizers", "sampling"),  # each has its streams
    "decoding": (),  # all
    "lab": ("rules", "fidelity"),
}
PASSED = {"PASS": True, "FAIL": False, "PUBLISHED": None}
LINE = re.compile(r"(PASS|FAIL|PUBLISHED|NOT RUN) +(.*): (.*)")
CI = {
    "check": None,
    "test": 150.0,
    "test-full": 1500.0,
}  # make target: most seconds, on two quiet cores


def acceptance() -> Iterator[Line]:
    """The lines of earlier pieces of work that are about right answers."""
    left_out = []
    for name, parts in PARTS.items():
        only = ["--only", *parts] if parts else []
        command = [sys.executable, str(ROOT / "bench" / "accept" / f"{name}.py"), *only]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        count = 0
        for text in process.stdout:
            if (found := LINE.match(text)) is not None:
                verdict, what, figure = found.groups()
                count += 1
                if verdict == "NOT RUN":
                    left_out.append(f"{name}, {what}: {figure}")
                else:
                    yield Line(f"{name}: {what}", figure, PASSED[verdict])
        status = process.wait()
        if not count or status not in (0, 1):
            yield Line(f"{name}: the script itself", f"{count} lines, exit status {status}", False)
    if left_out:
        raise NotRun("; ".join(left_out))


def house() -> Iterator[Line]:
    """The tables of bench/house.py, then each figure that it holds to a bar."""
    script = ROOT / "bench" / "house.py"
    if not script.is_file():
        raise NotRun("bench/house.py, which counts the rooms, is absent")
    print(
        subprocess.run([sys.executable, script], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    )
    done = subprocess.run(
        [sys.executable, script, "--json"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"bench/house.py: {done.stderr.strip()[-300:]}")
    yield from counted(done.stdout)


def counted(text: str) -> Iterator[Line]:
    """A line for each figure of what bench/house.py says as JSON."""
    found = json.loads(text)
    for name, figure in found["figures"].items():
        yield Line(
            f"house: {name}",
            "absent" if figure is None else f"{figure:,}",
            name not in found["missed"],
        )


def ci(
    sides: Callable[[], tuple[Side, Side]] | None, before: float | None, after: float | None
) -> Iterator[Line]:
    """What CI takes: measured on both sides, or as somebody measured it."""
    if sides is None and (before is None or after is None):
        raise NotRun("half an hour or more: --ci measures it, --ci-before and --ci-after tell it")
    if sides is not None:
        totals = []
        for side in sides():
            seconds, lines = _timed(side)
            totals.append(seconds)
            yield from lines
        before, after = totals
    figure = f"{after:,.0f} s, was {before:,.0f} s"
    yield Line("CI: check, test and test-full together, after and before", figure, None)


def _timed(side: Side) -> tuple[float, list[Line]]:
    """Seconds of all targets of a side, and what is said of each; bars are for our side."""
    total, lines = 0.0, []
    for target, most in CI.items():
        begin = time.monotonic()
        done = subprocess.run(
            ["make", target], cwd=side.root, env=side.environment(), capture_output=True
        )
        seconds = time.monotonic() - begin
        total += seconds
        bar = most if side.name == house_base.ours().name else None
        aim = f" under {bar:.0f} s" if bar else ""
        passed = done.returncode == 0 and seconds < bar if bar else None
        end = "" if done.returncode == 0 else f", exit status {done.returncode}"
        lines.append(Line(f"CI: make {target}{aim}, {side.name}", f"{seconds:,.0f} s{end}", passed))
    return total, lines
