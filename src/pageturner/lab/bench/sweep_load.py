"""One run of one point of a sweep: so many clients, or so many requests a second, for a bounded
time.

Owns what is sent at a point, when sending ends, when waiting ends, and which requests count. Must
not know how points follow each other, nor how they are shown.

Closed loop: each client sends its next request when its last is answered. All of them begin at
once, which is no part of the load that a point stands for: the first request of each is sent and
answered, and its latency does not count. Open loop: Poisson arrivals, whatever the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.config.flag_table import check_range
from pageturner.lab.bench import bench_serve
from pageturner.lab.bench.client import Client, ResponseTimes
from pageturner.lab.reporting import summary
from pageturner.lab.traffic import traffic_flags
from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_files import read_workload
from pageturner.lab.traffic.traffic_generators import arrival_times, word_prompts

AT_ONCE = 64  # random requests are made up in such groups
PAUSE = 0.2  # seconds that a client waits after an error, so that a dead server is not asked a thousand times
ENOUGH_ERRORS = 8  # without one answer: then nobody goes on asking

# -- what is sent ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """The requests that are sent at each point.

    make   the requests of a point, without end, for a seed. Prompts of different seeds have no
           beginning in common: else a prefix cache would know at each point what was sent at the
           one before
    about  in words
    """

    make: Callable[[int], Iterator[TrafficRequest]]
    about: str


def load_from_flags(arguments: argparse.Namespace, context: int) -> SweepLoad:
    """The load of `traffic_flags.add_load_flags` and `add_trace_flags`. context: most tokens of a
    request, 0: unknown. EngineFault for flags that contradict each other."""
    traffic_flags.check_load(arguments)
    check_range(arguments, "above 0", "length_scale", "cap", "input_len", "output_len")
    if arguments.trace:
        return _trace(arguments, context)
    return _workload(arguments) if arguments.workload else _words(arguments)


def _words(arguments: argparse.Namespace) -> SweepLoad:
    words, tokens, seed = arguments.input_len, arguments.output_len, arguments.seed

    def make(number: int) -> Iterator[TrafficRequest]:
        for lap in itertools.count():
            yield from word_prompts(AT_ONCE, words, tokens, _mixed(seed, number, lap))

    lengths = (
        f"{words // 2} to {words + words // 2} words in, {tokens // 2} to {tokens + tokens // 2}"
    )
    return SweepLoad(make, f"random words: {lengths} tokens out, seed {seed}")


def _workload(arguments: argparse.Namespace) -> SweepLoad:
    path = arguments.workload
    requests = read_workload(path)[: arguments.num_prompts or None]

    def make(number: int) -> Iterator[TrafficRequest]:
        for lap in itertools.count():
            for one in requests:
                yield replace(one, prompt=f"{number}.{lap}: {one.text}")

    about = (
        f"{path.name} (sha256 {traffic_flags.file_digest(path)}), {len(requests)} requests in turn"
    )
    return SweepLoad(make, f"{about}, with a number in front, other at each point")


def _trace(arguments: argparse.Namespace, context: int) -> SweepLoad:
    path = arguments.trace
    seed = arguments.seed
    found = traffic_flags.trace_from_flags(arguments, arguments.max_model_len or context)
    scaling = found.scaling
    writer = traffic_flags.prompt_writer(arguments)

    def make(number: int) -> Iterator[TrafficRequest]:
        for lap in itertools.count():
            other = writer.seeded(_mixed(seed, number, lap))
            for one in found.requests:
                yield from other.written([one])

    told = "ORACLE: servers are told every length" if scaling.oracle else "no oracle"
    return SweepLoad(
        make,
        f"lengths of {path.name} (sha256 {traffic_flags.file_digest(path)}), x {scaling.length:g}, cap"
        f" {scaling.cap} ({told}), {len(found.requests)} requests in turn, {found.left_out}",
    )


def point_seed(sweep: int, number: int, turn: int) -> int:
    """Return the seed of a run: the same for all servers, another one for each other run; below a
    million."""
    return (sweep * 100 + number) * 1000 + turn


def _mixed(*numbers: int) -> int:
    """One seed of several numbers below a million."""
    found = 0
    for number in numbers:
        found = found * 1_000_003 + number
    return found


# -- how it is sent --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PointBounds:
    """The limits on how long a point may take: sending ends after `seconds`, or after `requests`
    (0: any number) behind those that do not count, but not before each client has had its first
    answer, up to twice the seconds. Requests that are not answered after four times the seconds are
    given up."""

    seconds: float
    requests: int = 0

    @property
    def sending(self) -> float:
        return 2 * self.seconds

    @property
    def waiting(self) -> float:
        return 4 * self.seconds


@dataclass(slots=True)
class SentRequest:
    """A request and what came of it. ramp: the first of its client; its latency does not count."""

    asked: TrafficRequest
    times: ResponseTimes
    ramp: bool = False

    @property
    def answered(self) -> bool:
        return self.times.end > 0.0 and self.times.error is None

    @property
    def tokens(self) -> int:
        """The tokens of the answer as the server counts them; one for each chunk if the server does
        not."""
        return self.times.tokens or len(self.times.chunks)

    @property
    def wanted(self) -> int:
        """Tokens of its answer, as asked."""
        length, most = self.asked.answer_length, self.asked.max_tokens
        return length if most is None else min(length, most)

    def tokens_until(self, stop: float) -> float:
        """Return the tokens of the answer until this moment, spread evenly between first and last
        token."""
        chunks = self.times.chunks
        if not chunks or self.times.error is not None or chunks[0] > stop:
            return 0.0
        if chunks[-1] <= stop:
            return float(self.tokens)
        return 1 + (self.tokens - 1) * (stop - chunks[0]) / (chunks[-1] - chunks[0])


@dataclass(slots=True)
class PointRun:
    """Times: time.monotonic() seconds. stop: the end of what throughput is counted in: of a closed
    loop the moment when the first client had nothing left to send, of an open one the last answer.
    cut: when what was not answered was given up, or the last answer came."""

    begin: float
    stop: float = float("inf")
    cut: float = 0.0
    sent: list[SentRequest] = field(default_factory=list)
    answered: int = 0
    ended: int = 0

    @property
    def hopeless(self) -> bool:
        """Nothing but errors."""
        return self.ended >= ENOUGH_ERRORS and not self.answered


Told = Callable[[int], None]  # how many were answered


async def closed_point(
    client: Client,
    requests: Iterator[TrafficRequest],
    clients: int,
    bounds: PointBounds,
    told: Told,
) -> PointRun:
    """`clients` requests open at any moment."""
    run = PointRun(time.monotonic())
    first = [False] * clients  # whether each has had its first answer

    def over() -> bool:
        past = time.monotonic() - run.begin
        enough = bounds.requests and len(run.sent) >= clients + bounds.requests
        wanted = past < bounds.seconds and not enough
        return run.hopeless or past >= bounds.sending or (all(first) and not wanted)

    async def work(number: int) -> None:
        while not over():
            sent = SentRequest(next(requests), ResponseTimes(), ramp=not first[number])
            await _send(client, sent, run, told)
            first[number] = True
        run.stop = min(run.stop, time.monotonic())

    await _wait(map(work, range(clients)), run, bounds)
    run.stop = min(run.stop, run.cut)
    return run


async def open_point(
    client: Client,
    requests: Iterator[TrafficRequest],
    rate: float,
    bounds: PointBounds,
    seed: int,
    told: Told,
) -> PointRun:
    """Poisson arrivals at `rate` requests a second, of which the first comes at once."""
    times = list(arrivals(rate, bounds, seed))
    run = PointRun(time.monotonic())

    async def work(at: float, asked: TrafficRequest) -> None:
        await asyncio.sleep(run.begin + at - time.monotonic())
        if not run.hopeless:
            await _send(client, SentRequest(asked, ResponseTimes()), run, told)

    await _wait(itertools.starmap(work, zip(times, requests, strict=False)), run, bounds)
    run.stop = run.cut
    return run


def arrivals(rate: float, bounds: PointBounds, seed: int) -> Iterator[float]:
    """Seconds at which requests come, from 0 on: within the time of a point, or so many as it
    has."""
    first = None
    for number, at in enumerate(arrival_times(rate, 1.0, seed)):
        first = at if first is None else first
        most = bounds.sending if bounds.requests else bounds.seconds
        if at - first > most or (bounds.requests and number >= bounds.requests):
            return
        yield at - first


async def _send(client: Client, sent: SentRequest, run: PointRun, told: Told) -> None:
    one = sent.asked
    run.sent.append(sent)
    await client.complete(one.text, one.max_tokens or one.answer_length, one.output, sent.times)
    run.ended += 1
    run.answered += sent.answered
    told(run.answered)
    if sent.times.error is not None:
        await asyncio.sleep(PAUSE)


async def _wait(work: Iterable[Any], run: PointRun, bounds: PointBounds) -> None:
    """Wait until all requests are answered, or the time of the point is up."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, timeout=bounds.waiting)
        run.cut = max([one.times.end for one in run.sent if one.answered], default=time.monotonic())
        if not all(task.done() for task in tasks):
            run.cut = time.monotonic()
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    faults = [one for one in ended if isinstance(one, Exception)]
    if faults:
        raise faults[0]


# -- what came of it -------------------------------------------------------------------------------


def point_figures(run: PointRun, targets: dict[str, float]) -> dict[str, Any]:
    """Counts, rates per second and latencies in milliseconds of one run.

    A request that was given up counts in the latencies with the time that it had waited: they are
    at least that long. Requests a second are output tokens a second by the mean length of an
    answer.
    """
    refused = [one for one in run.sent if one.times.refused]
    failed = [one for one in run.sent if one.times.error is not None and not one.times.refused]
    answered = [one for one in run.sent if one.answered]
    counted = [one for one in run.sent if not one.ramp]
    ramp_counts = not any(one.answered for one in counted)
    counted = run.sent if ramp_counts else counted
    good = [one.times for one in counted if one.answered]
    left = [one.times for one in counted if not one.times.end]
    seconds = max(run.stop - run.begin, 1e-9)
    speed = sum(one.tokens_until(run.stop) for one in run.sent) / seconds
    answer = sum(one.tokens for one in answered) / max(len(answered), 1)
    rate = speed / answer if answer else 0.0
    met = bench_serve.goodput([one.times for one in counted if one.times.end], 1.0, targets)[
        "requests"
    ]
    waited = [(each.chunks[0] if each.chunks else run.cut) - each.begin for each in left]
    tpot = [1e3 * one.times.tpot for one in counted if one.answered and one.tokens > 1]
    return {
        "requests": len(run.sent),
        "answered": len(answered),
        "counted": len(counted),
        "errors": len(failed),
        "refused": len(refused),
        "unanswered": len(run.sent) - len(answered) - len(failed) - len(refused),
        "messages": sorted({one.times.error or "" for one in failed})[:3],
        "ramp_counts": ramp_counts,
        "seconds": seconds,
        "prompt_tokens": sum(one.times.prompt_tokens for one in answered) / max(len(answered), 1),
        "answer_tokens": answer,
        "asked_tokens": sum(one.wanted for one in answered) / max(len(answered), 1),
        "output_tokens_per_s": speed,
        "requests_per_s": rate,
        **_percentiles("ttft_ms", [1e3 * one.ttft for one in good] + [1e3 * one for one in waited]),
        **_percentiles("tpot_ms", tpot),
        "gap_ms_p99": summary.percentile([1e3 * gap for one in good + left for gap in one.itl], 99),
        "goodput_share": met / max(len(counted), 1) if targets else None,
        "goodput_per_s": rate * met / max(len(counted), 1) if targets else None,
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p{q}": summary.percentile(values, q) for q in (50, 99)}
