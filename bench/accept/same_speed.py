"""Nothing slower: both sides in interleaved pairs.

Owns what is measured, the order of the runs and the bars. Each side runs its own command line and server in
its own environment; only scheduler.py is one script for both. A ratio is the base's time by ours, so
1.02 is 2 % faster, and the median of the ratios of all pairs counts.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sides
from harness import DATA, ROOT, Line, NotRun
from sides import Address, Side

MIN_RATIO = 0.99  # the median of the pairs
GAP = "with statistics, 256 x 2,000 tokens"  # names of figures of scheduler.py end so
MAX_STALL = 2.0  # times the median gap between two steps
PUBLISHED = ("engine step", "gap")  # figures without a bar, by how their names begin
WORKLOADS = ("mixed64", "prefix")
BATCHES = (1, 8, 32, 64)
TEXT = "of and to in is you that it he was for on are as with at"
WORDS = TEXT.split()
PROMPT, ANSWER = 100, 96  # words and tokens of the requests that decode together
FIRST_TOKENS = 20  # streams, one after the other, of which the first token is timed

Figures = dict[str, float]
Measure = Callable[[Side], Figures]  # figures of one side, of which less is better


def pairs(base: Side, ours: Side, measure: Measure, rounds: int) -> list[tuple[Figures, Figures]]:
    """Both sides in turns; the side that is first in a pair is second in the next."""
    found = []
    for turn in range(rounds):
        order = (base, ours) if turn % 2 == 0 else (ours, base)
        both = {side.name: measure(side) for side in order}
        found.append((both[base.name], both[ours.name]))
    return found


def judged(found: list[tuple[Figures, Figures]], unit: str) -> Iterator[Line]:
    """A line for each figure that was measured on both sides."""
    for name in found[0][0]:
        ratios = [base[name] / ours[name] for base, ours in found]
        middle = statistics.median(ratios)
        ours, base = (statistics.median(pair[side][name] for pair in found) for side in (1, 0))
        spread = f"{len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f}"
        figure = f"{middle:.3f}x ({spread}); {ours:,.4g} {unit}, was {base:,.4g}"
        if name.startswith(PUBLISHED):
            yield Line(name, figure, None)
        else:
            yield Line(f"{name}: at least {MIN_RATIO}x", figure, middle >= MIN_RATIO)


def stall(found: list[tuple[Figures, Figures]]) -> Line:
    """What reading the statistics adds to a gap between steps, before and after."""
    base, ours = (
        statistics.median(
            pair[side][f"gap p99 {GAP}"] / pair[side][f"gap p50 {GAP}"] for pair in found
        )
        for side in (0, 1)
    )
    what = f"no stall: gap p99 {GAP}, at most {MAX_STALL}x the median gap"
    return Line(what, f"{ours:.2f}x, was {base:.2f}x", ours <= MAX_STALL)


def bench_engine(side: Side, *flags: str) -> dict[str, Any]:
    """The figures of `pageturner bench engine`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        side.run(*side.command("bench", "engine", *flags, "--output", str(output)))
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


def decoding(batch: int) -> Measure:
    """The median step in which so many sequences, all there from the start, decode together."""
    rows = []
    for i in range(batch):
        prompt = " ".join(WORDS[(i + 3 * j * (i + 1)) % len(WORDS)] for j in range(PROMPT))
        rows.append(json.dumps({"prompt": prompt, "max_tokens": ANSWER}) + "\n")

    def measure(side: Side) -> Figures:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(rows)
            file.flush()
            figures = bench_engine(side, "--workload", file.name, "--max-num-seqs", str(batch))
        return {f"decode step, {batch} sequences": figures["step_ms"]["p50"]}

    return measure


def workload(name: str) -> Measure:
    """All requests of a recorded workload at once: seconds of all steps."""
    path = DATA / "workloads" / f"{name}.jsonl"

    def measure(side: Side) -> Figures:
        return {name: bench_engine(side, "--workload", str(path))["seconds"]}

    return measure


def scheduling(side: Side) -> Figures:
    """The figures of scheduler.py, run by the Python of that side."""
    script = ROOT / "bench" / "scheduler.py"
    figures: Figures = json.loads(side.run(str(side.python), str(script)))
    return figures


def first_token(side: Side) -> Figures:
    """The median time from a request to the first streamed token of SmolLM2, nothing else running."""
    with sides.serving(side) as address:
        taken = [first_event_ms(address, number) for number in range(FIRST_TOKENS + 1)]
    return {"first streamed token": statistics.median(taken[1:])}


def first_event_ms(address: Address, number: int) -> float:
    """Milliseconds until the first event of a streamed completion; the rest of it is read."""
    body = {"prompt": f"{number}: {TEXT}", "max_tokens": 4, "temperature": 0.0}
    connection = http.client.HTTPConnection(address.host, address.port, timeout=300)
    try:
        connection.connect()
        begin = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        answer = connection.getresponse()
        answer.readline()
        taken = 1000 * (time.perf_counter() - begin)
        answer.read()
        return taken
    finally:
        connection.close()


def lines(base: Side, ours: Side, rounds: int) -> Iterator[Line]:
    """Every figure; workloads whose file is absent are a line that says so."""
    found = pairs(base, ours, scheduling, rounds)
    yield from judged(found, "us")
    yield stall(found)
    for batch in BATCHES:
        yield from judged(pairs(base, ours, decoding(batch), rounds), "ms")
    yield from judged(pairs(base, ours, first_token, rounds), "ms")
    absent = [name for name in WORKLOADS if not (DATA / "workloads" / f"{name}.jsonl").is_file()]
    for name in WORKLOADS:
        if name not in absent:
            yield from judged(pairs(base, ours, workload(name), rounds), "s")
    if absent:
        raise NotRun(f"workloads {', '.join(absent)} are absent from {DATA / 'workloads'}")
