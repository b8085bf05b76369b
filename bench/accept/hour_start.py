"""The start: a fresh clone as a new user runs it, on the machine as it is and beside sixteen busy loops.

Owns the clone in a temporary folder, with an environment and a cache of its own, what `make serve` and
`pip install` say and when, and the first streamed token. The registry of packages is asked, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import harness
import page_install
from harness import ROOT, Line

LOOPS, SILENT_S, QUIET_S, BUSY_S = 16, 5.0, 40.0, 240.0
QUIET_LOAD = 0.7  # of the last minute: above it the machine is not quiet
GIVE_UP_S = 1800.0
SDIST = "import sys; sys.path[:0] = ['setup']; import pageturner_build as b; print(b.build_sdist(sys.argv[1]))"


@dataclass(slots=True)
class Said:
    """The lines of a program, with the seconds since its start."""

    begin: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def silence(self, until: float) -> tuple[float, str]:
        """The longest time without a line, and the line before it."""
        moments = [(0.0, "the start"), *self.lines, (until, "")]
        pairs = itertools.pairwise(moments)
        return max((after - before, text) for (before, text), (after, _) in pairs)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def steps(self) -> str:
        done = [(at, text) for at, text in self.lines if ": done in " in text]
        return "; ".join(f"{text} (at {at:.0f} s)" for at, text in done)


@contextlib.contextmanager
def watched(
    command: list[str], folder: Path, cache: Path
) -> Iterator[tuple[Said, subprocess.Popen[str]]]:
    """A program whose lines are read as they come; its group is ended, by its id."""
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment = {**kept, "PAGETURNER_CACHE": str(cache)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = Said()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                said.lines.append((said.seconds, line.rstrip()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield said, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        reader.join(10)


def clone_lines(folder: Path, what: str, limit: float, judged: bool) -> Iterator[Line]:
    """Clone, `make serve`, ask: the timeline of a fresh clone."""
    begin, before_it = time.monotonic(), os.times().children_user + os.times().children_system
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    cloned, port = time.monotonic() - begin, harness.free_port()
    with watched(["make", "serve", f"ARGS=--port {port}"], clone, folder / "cache") as (
        said,
        process,
    ):
        while not any("listening on" in text for _, text in said.lines):
            if process.poll() is not None or said.seconds > GIVE_UP_S:
                last = " | ".join(text for _, text in said.lines[-5:])
                yield Line(f"{what}: it starts", f"status {process.poll()}: {last}", False)
                return
            time.sleep(0.05)
        ready = said.seconds
        page_install.first_answer(f"http://127.0.0.1:{port}")
        whole = time.monotonic() - begin
    spent = os.times()
    silent, before = said.silence(ready)
    figure = f"{silent:.1f} s, behind: {before[:100]}"
    yield Line(f"{what}: longest silence, {SILENT_S:.0f} s at most", figure, silent <= SILENT_S)
    figure = (
        f"{whole:.1f} s (clone {cloned:.1f}, ready at {cloned + ready:.1f};"
        f" {spent.children_user + spent.children_system - before_it:.0f} s of processors)"
    )
    if judged:
        yield Line(f"{what}: clone to first token, under {limit:.0f} s", figure, whole < limit)
    else:
        figure += f"; load {os.getloadavg()[0]:.1f}, not quiet"
        yield Line(f"{what}: clone to first token, under {limit:.0f} s", figure, None, run=False)
    yield Line(f"{what}: each step", said.steps(), None)
    yield from ready_lines([text for _, text in said.lines])
    seen = sum("of" in text and "compiling the kernels" in text for _, text in said.lines)
    yield Line(f"{what}: lines that say how many files are compiled", f"{seen}", seen > 0)


def ready_lines(lines: list[str]) -> Iterator[Line]:
    """The parts of "ready in", and what has no place at a first start."""
    text = next(line for line in lines if "ready in" in line)
    total, parts = re.findall(r"ready in ([\d.]+) s \(([^)]*)\)", text)[0]
    numbers = [float(number) for number in re.findall(r" ([\d.]+)(?:,|$)", parts)]
    figure = f"{sum(numbers):.2f} of {total} s: {parts}"
    yield Line("the parts of `ready in` add up", figure, abs(sum(numbers) - float(total)) < 0.006)
    yield Line("no `kv_taken_back` at a first start", text[:40], "taken_back" not in text)


def sdist_lines(folder: Path) -> Iterator[Line]:
    """`pip install` of the sdist, with an isolated build as pip makes it."""
    clone = folder / "clone"
    done = harness.ran(sys.executable, "-c", SDIST, folder, cwd=clone)
    made = folder / done.stdout.strip().splitlines()[-1]
    command = [clone / ".venv/bin/python", "-m", "pip", "install", "--no-deps", "--target"]
    words = [*map(str, command), str(folder / "installed"), str(made)]
    with watched(words, folder, folder / "cache") as (said, process):
        process.wait(GIVE_UP_S)
    silent, before = said.silence(said.lines[-1][0])
    seen = [text for _, text in said.lines if "compiling the kernels" in text]
    figure = f"{silent:.1f} s, behind: {before[:80]}; {len(seen)} lines such as {seen[-1:]}"
    good = silent <= SILENT_S and bool(seen) and process.returncode == 0
    yield Line(f"pip install of the sdist: longest silence, {SILENT_S:.0f} s at most", figure, good)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hour-start", nargs="*", default=["quiet", "sdist", "busy"], help="which")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Each of them in a folder of its own."""
    chosen = options.hour_start
    with tempfile.TemporaryDirectory() as name:
        if "quiet" in chosen or "sdist" in chosen:
            quiet = os.getloadavg()[0] <= QUIET_LOAD
            yield from clone_lines(Path(name), "quiet machine", QUIET_S, quiet)
        if "sdist" in chosen:
            yield from sdist_lines(Path(name))
    if "busy" not in chosen:
        return
    free = os.getloadavg()[0] <= 4  # others must not stand beside the loops
    with tempfile.TemporaryDirectory() as name, harness.busy(LOOPS):
        yield from clone_lines(Path(name), f"beside {LOOPS} busy loops", BUSY_S, free)
    shutil.rmtree(name, ignore_errors=True)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
