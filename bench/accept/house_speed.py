"""Nothing slower: this tree and commit 8cc2ebe, in interleaved pairs.

Owns what is measured, the order of the runs and the bars. Each side runs its own command line in its own
environment; only house_plan.py is one script for both. A ratio is the other side's time by ours, so 1.02 is
2 % faster, and of the ratios of all pairs the median counts.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import house_base
from harness import DATA, Line
from house_base import Address, Side

LEAST = 0.99  # the median ratio
WAITER = 1.5  # the same where one request waits and finds no room
WORKLOADS = ("mixed64", "prefix")
BATCHES = (1, 8, 32, 64)
WORDS = (
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "at",
)
PROMPT, ANSWER = 100, 96  # words and tokens of the requests that decode together
STREAMS, TOKENS = 64, 400  # of the streams with stop strings and without
MORE = (
    1.03  # times the processor time that stop strings may cost: what two runs of one load differ by
)
STEP_SECONDS = 0.01  # of the fake engine that those streams come from
STOPS = ["a stop string that no answer has", "\u0001"]

Figures = dict[str, float]
Measure = Callable[[Side], Figures]  # figures of one side, of which less is better


def pairs(base: Side, ours: Side, measure: Measure, rounds: int) -> list[tuple[Figures, Figures]]:
    """Both sides in turns, the first of a pair the second of the next."""
    found = []
    for turn in range(rounds):
        both = {
            side.name: measure(side) for side in ((base, ours) if turn % 2 == 0 else (ours, base))
        }
        found.append((both[base.name], both[ours.name]))
    return found


def judged(
    found: list[tuple[Figures, Figures]], bars: dict[str, float | None], unit: str
) -> Iterator[Line]:
    """A line for each figure that was measured on both sides. bars: the least median ratio, None for a figure
    that is only told; LEAST where nothing is said."""
    for name in found[0][0]:
        ratios = [base[name] / ours[name] for base, ours in found]
        middle = statistics.median(ratios)
        ours, base = (statistics.median(pair[side][name] for pair in found) for side in (1, 0))
        bar = bars.get(name, LEAST)
        spread = f"{len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f}"
        figure = f"{middle:.3f}x ({spread}); {ours:,.4g} {unit}, was {base:,.4g}"
        aim = f": at least {bar}x" if bar is not None else ""
        yield Line(f"{name}{aim}", figure, None if bar is None else middle >= bar)


def bench_engine(side: Side, *flags: str) -> dict[str, Any]:
    """The figures of `pageturner bench engine`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = side.command("bench", "engine", *flags, "--output", str(output))
        done = subprocess.run(
            command, cwd=side.root, env=side.environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"{side.name}: bench engine {' '.join(flags)}: {done.stderr.strip()[-300:]}"
            )
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


def decoding(batch: int) -> Measure:
    """The median step in which so many sequences, all there from the start, decode together."""
    prompts = [
        " ".join(WORDS[(i + 3 * j * (i + 1)) % len(WORDS)] for j in range(PROMPT))
        for i in range(batch)
    ]
    text = "".join(
        json.dumps({"prompt": prompt, "max_tokens": ANSWER}) + "\n" for prompt in prompts
    )

    def measure(side: Side) -> Figures:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write(text)
            file.flush()
            figures = bench_engine(side, "--workload", file.name, "--max-num-seqs", str(batch))
        return {f"decode step, {batch} sequences": figures["step_ms"]["p50"]}

    return measure


def workload(name: str) -> Measure:
    """All requests of a recorded workload at once: seconds of all steps."""

    def measure(side: Side) -> Figures:
        figures = bench_engine(side, "--workload", str(DATA / "workloads" / f"{name}.jsonl"))
        return {name: figures["seconds"]}

    return measure


def scheduling(side: Side) -> Figures:
    """Of house_plan.py, run by the Python of that side."""
    script = Path(__file__).with_name("house_plan.py")
    done = subprocess.run(
        [side.python, script], cwd=side.root, env=side.environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{side.name}: house_plan.py: {done.stderr.strip()[-300:]}")
    figures: Figures = json.loads(done.stdout)
    return figures


# -- stop strings --------------------------------------------------------------------------------------------


def streams_cost(address: Address, stops: bool) -> float:
    """Seconds of processor time that the API process spends on all streams, which run together."""
    fields: dict[str, Any] = {
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    if stops:
        fields["stop"] = STOPS
    before = processor_seconds(address.pid)
    with ThreadPoolExecutor(STREAMS) as pool:
        events = list(pool.map(lambda number: _streamed(address, fields, number), range(STREAMS)))
    if any(count < TOKENS for count in events):
        raise RuntimeError(f"streams of {TOKENS} tokens ended early: {sorted(set(events))} events")
    return processor_seconds(address.pid) - before


def _streamed(address: Address, fields: dict[str, Any], number: int) -> int:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=300)
    try:
        body = json.dumps(fields | {"prompt": f"stream number {number} says"})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().read().count(b"data: {")
    finally:
        connection.close()


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def stop_strings(side: Side, rounds: int) -> list[float]:
    """How many times the processor time streams with stop strings cost, pair by pair."""
    environment = {
        "PAGETURNER_FAKE_VOCAB": "40000",
        "PAGETURNER_FAKE_STEP_SECONDS": str(STEP_SECONDS),
    }
    with house_base.serving(side, "--backend", "fake", **environment) as address:
        streams_cost(address, False)
        ratios = []
        for turn in range(rounds):
            cost = {
                stops: streams_cost(address, stops)
                for stops in ((False, True), (True, False))[turn % 2]
            }
            ratios.append(cost[True] / cost[False])
        return ratios


def stop_line(side: Side, rounds: int, bar: float | None) -> Line:
    ratios = stop_strings(side, rounds)
    middle = statistics.median(ratios)
    what = f"API process, {STREAMS} streams with stop strings by those without, {side.name}"
    figure = f"{middle:.3f}x its processor time ({len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f})"
    aim = f": no more (within {MORE - 1:.0%})" if bar is not None else ""
    return Line(what + aim, figure, None if bar is None else middle <= bar)


def lines(base: Side, ours: Side, rounds: int) -> Iterator[Line]:
    """Everything; what a workload's file lacks is a line that says so."""
    only_told = {f"engine step, {load}": None for load in ("64", "256", "256 and a waiter")}
    bars: dict[str, float | None] = {"plan + commit, 256 and a waiter": WAITER, **only_told}
    yield from judged(pairs(base, ours, scheduling, rounds), bars, "us")
    for batch in BATCHES:
        yield from judged(pairs(base, ours, decoding(batch), rounds), {}, "ms")
    absent = []
    for name in WORKLOADS:
        if not (DATA / "workloads" / f"{name}.jsonl").is_file():
            absent.append(name)
            continue
        yield from judged(pairs(base, ours, workload(name), rounds), {}, "s")
    yield stop_line(ours, rounds, MORE)
    yield stop_line(base, rounds, None)
    if absent:
        raise house_base.NotRun(
            f"workloads {', '.join(absent)} are absent from {DATA / 'workloads'}"
        )
