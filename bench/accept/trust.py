"""`make accept NAME=trust`: nobody can slow anybody, KV survives, answers can be proved.

    python bench/accept/trust.py [--only hostile chaos recovery load fuzz soak] [--seed 1]
                                 [--most N] [--minutes 20] [--fuzz-seconds 1800] [--requests N]

hostile   every request of bench/hostile_requests.py beside ordinary streams, at three intensities
chaos     answers of all methods while engines die, hang and are poisoned
recovery  kill -9 to the next token, with KV taken back and computed again
load      2,000 connections through one API process
fuzz      damaged files, frames, answers and JSON; the kernels under sanitizers
soak      a million requests with the fake engine, and memory; only where it is asked for
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import harness
import trust_chaos
import trust_hostile
import trust_load
import trust_soak
from harness import ROOT, Line

RECOVERY = re.compile(
    r"first ([\d.]+) s and ([\d.]+) s \(x([\d.]+)\), all ([\d.]+) s and ([\d.]+) s \(x([\d.]+)\)"
)


def recovery() -> Iterator[Line]:
    """8 streams with long contexts, and 32 with short ones."""
    for streams, context, bar in ((8, 4000, "at least 5x apart"), (32, 100, "within 1 s")):
        words = f"bench/recovery.py --streams {streams} --context {context} --rounds 1"
        command = [sys.executable, *words.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        told = RECOVERY.search(done.stdout)
        if done.returncode or told is None:
            raise RuntimeError((done.stdout + done.stderr)[-300:])
        kept, lost, apart, all_kept, all_lost, all_apart = map(float, told.groups())
        what = f"kill -9 to next token, {streams} streams of {context} tokens, bit-equal, {bar}"
        figure = f"first {kept} s taken back, {lost} s computed again ({apart}x);"
        figure += f" all {all_kept} and {all_lost} s ({all_apart}x)"
        yield Line(what, figure, apart >= 5 if context > 1000 else all_kept <= 1.0)


# what is fuzzed: script and its kinds, the share of the time that it gets
FUZZED: dict[str, tuple[list[str], float]] = {
    "files: GGUF, safetensors, tokenizer.json, configs, templates": (["bench/fuzz_files.py"], 0.35),
    "frames: channel, ledger, text workers, KV files": (
        ["bench/fuzz_frames.py", "--kinds", "channel", "engine", "pool", "worker", "outcome", "kv"],
        0.3,
    ),
    "answers and server-sent events of replicas": (
        ["bench/fuzz_frames.py", "--kinds", "router", "client"],
        0.15,
    ),
    "JSON bodies of all endpoints": (["bench/fuzz_frames.py", "--kinds", "json"], 0.2),
}
FUZZ_SEED = 12  # of the first run of each; where processor time is left over, the next seed follows
FUZZ_PATIENCE = 4.0  # times the processor time that a kind may take on the clock


def fuzz(seconds: float) -> Iterator[Line]:
    """Each for its share of so much processor time, however busy the machine is; HTTP by its test; the
    kernels under sanitizers."""
    begin = _used_by_children()
    for what, (command, share) in FUZZED.items():
        yield _fuzzed(what, command, share * seconds)
    minutes = (_used_by_children() - begin) / 60
    yield Line(
        "processor time of all of them", f"{minutes:.1f} minutes", minutes * 60 > 0.95 * seconds
    )
    yield harness.pytest_line("HTTP", "tests/server/test_http_fuzz.py", "-m", "not peer")
    yield sanitized()


def _fuzzed(what: str, command: list[str], seconds: float) -> Line:
    """One kind, until it has had so much processor time."""
    figures, good, seed, left = [], True, FUZZ_SEED, seconds
    patience = time.monotonic() + FUZZ_PATIENCE * seconds
    while left > 1 and time.monotonic() < patience:
        before, more = _used_by_children(), ["--seconds", str(left), "--seed", str(seed)]
        done = subprocess.run(
            [sys.executable, *command, *more], cwd=ROOT, capture_output=True, text=True
        )
        figures += [line for line in done.stdout.splitlines() if "findings" in line] or [
            done.stderr[-300:]
        ]
        good, seed, left = (
            good and done.returncode == 0,
            seed + 1,
            left - (_used_by_children() - before),
        )
    return Line(what, "; ".join(figures), good)


def _used_by_children() -> float:
    """Seconds of processor time of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sanitized() -> Line:
    """All kernels of every instruction set of this machine: addresses, undefined behaviour, data races; then
    the binding."""
    command = [sys.executable, "tests/native/run.py", "sanitized", "bound"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if re.search("passed;|binding|NOT RUN", line)]
    return Line("C++ under sanitizers", "; ".join(told) or done.stdout[-300:], done.returncode == 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the hostile requests")
    parser.add_argument("--most", type=int, default=10_000, help="hostile requests")
    parser.add_argument("--minutes", type=float, default=20.0, help="of chaos")
    parser.add_argument("--fuzz-seconds", type=float, default=1800.0)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the soak")


CHECKS: dict[str, harness.Check] = {
    "hostile": lambda o: trust_hostile.lines(o.seed, o.most),
    "chaos": lambda o: trust_chaos.lines(o.minutes, faults=max(6, round(4 * o.minutes))),
    "recovery": lambda _: recovery(),
    "load": lambda _: trust_load.lines(),
    "fuzz": lambda o: fuzz(o.fuzz_seconds),
}

if __name__ == "__main__":
    if "soak" in sys.argv:  # a quarter of an hour by itself, and part of `make soak`
        CHECKS["soak"] = lambda o: trust_soak.lines(o.requests)
    parts = {name: harness.Part(lines, add_arguments) for name, lines in CHECKS.items()}
    sys.exit(harness.main("trust", __doc__, parts))
