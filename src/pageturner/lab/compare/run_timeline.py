"""A recorded run step by step: which sequence was in which step, how full steps and memory were,
padding.

Owns what is counted, and over what. Times are seconds from the first arrival, memory is in tokens.
Must not know policies, and not how anything is drawn.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.reporting import summary
from pageturner.lab.simulation import recorded_runs
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.step_cost import work_of_step
from pageturner.telemetry.step_log import Arrived, ItemRecord, StepRecord
from pageturner.telemetry.work import (
    MachineLimits,
    StepDemand,
    WorkTotals,
    spans_of_ballast,
    work_of_spans,
)

Key = tuple[int, int]  # id of the request, index of the sequence


@dataclass(slots=True)
class SlotSpan:
    """One sequence in one place of the batch for steps in a row. kind: prefill, decode, stalled (it
    runs and is in none of these steps) or padding (it has ended, and its rows are computed all the
    same)."""

    slot: int
    id: int
    kind: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Moment:
    """One step, and memory behind it.

    decoding, prefilling, padding, stalled   sequences
    rows, padded     computed in all, and of those for nobody
    reserved, used   tokens in blocks, and of those with KV (shared ones once)
    whole            what prompt and max_tokens of all who run would take
    read, compute    shares of the machine's limits; nobody: what of compute was padding. 0 where
                     they are not known (RunTimeline.limits)
    """

    begin: float
    end: float
    decoding: int
    prefilling: int
    padding: int
    stalled: int
    waiting: int
    rows: int
    padded: int
    reserved: int
    used: int
    whole: int
    read: float = 0.0
    compute: float = 0.0
    nobody: float = 0.0


@dataclass(slots=True)
class RequestTimeline:
    """One request. prompt, answer: tokens; first: seconds from its arrival to its first token, nan
    before."""

    prompt: int
    tenant: str = ""
    answer: int = 0
    first: float = math.nan


@dataclass(slots=True)
class RunTimeline:
    """A whole run.

    gaps     between two tokens of one answer
    service  by tenant: (time, tokens so far); a token of an answer counts as much as the order fair
             takes it
    queued   by tenant: when the last of its requests was admitted for the first time
    e2e      by request: from its arrival to its end
    requests by id
    usage    of all steps, without the time in kernels; limits: of the machine that they ran on
    """

    seconds: float
    slots: int = 0
    spans: list[SlotSpan] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    service: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    queued: dict[str, float] = field(default_factory=dict)
    e2e: dict[int, float] = field(default_factory=dict)
    requests: dict[int, RequestTimeline] = field(default_factory=dict)
    preemptions: int = 0
    usage: WorkTotals = field(default_factory=WorkTotals)
    limits: MachineLimits | None = None


def timeline_of(run: RecordedRun) -> RunTimeline:
    """Walk through the log once."""
    walk = _Walk(run)
    for step in run.steps:
        if step.items or step.ballast:
            walk.step(step)
    return walk.timeline


class _Walk:
    """Follows each sequence through the steps of a log."""

    def __init__(self, run: RecordedRun) -> None:
        self._arrived = {record.id: record for record in run.records if isinstance(record, Arrived)}
        self._prompts = {id: len(record.prompt) // 4 for id, record in self._arrived.items()}
        self._zero = min((record.arrival for record in self._arrived.values()), default=0.0)
        self._longest = run.header.max_model_len
        self._block = run.config.block_size
        self._weight = run.config.output_weight
        end = max((step.end for step in run.steps if step.items), default=self._zero)
        self.timeline = RunTimeline(end - self._zero, limits=run.header.limits)
        self._needs = run.header.needs
        self._slots: dict[Key, int] = {}
        self._free: list[int] = []
        self._ended: list[tuple[int, int]] = []  # (slot, id) whose rows may still be computed
        self._held: dict[Key, int] = {}  # tokens with KV
        self._last: dict[Key, float] = {}  # when it got its newest token
        self._open: dict[
            tuple[int, str], tuple[int, SlotSpan]
        ] = {}  # (slot, kind) -> (number of its step, span)
        self._number = 0
        self._met: set[int] = set()

    def step(self, step: StepRecord) -> None:
        begin, end = step.start - self._zero, step.end - self._zero
        self._number += 1
        self._give_back(step)
        padded = self._padding(step, begin, end)
        kinds = {"prefill": 0, "decode": 0}
        there = set()
        for item in step.items:
            kind = self._item(item, begin, end)
            kinds[kind] += 1
            there.add((item.id, item.index))
        stalled = [key for key in self._slots if key not in there]
        for key in stalled:
            self._draw(self._slots[key], key[0], "stalled", begin, end)
        for id, index, _ in step.ended:
            self._end((id, index))
            self.timeline.e2e[id] = step.end - self._arrived[id].arrival
        self.timeline.moments.append(
            Moment(
                begin,
                end,
                kinds["decode"],
                kinds["prefill"],
                padded,
                len(stalled),
                step.waiting,
                step.tokens,
                sum(rows for rows, _ in step.ballast),
                *self._memory(step),
                *self._shares(step),
            )
        )

    def _give_back(self, step: StepRecord) -> None:
        """Preempted sequences lose their places in the batch."""
        self.timeline.preemptions += len(step.preempted)
        gone = set(step.preempted)
        for key in [key for key in self._slots if key[0] in gone]:
            heapq.heappush(self._free, self._slots.pop(key))
            del self._held[key]

    def _padding(self, step: StepRecord, begin: float, end: float) -> int:
        """Members that have ended keep their places for as long as a row is computed for each."""
        joins = any((item.id, item.index) not in self._slots for item in step.items)
        if joins or sum(rows == 1 for rows, _ in step.ballast) < len(self._ended):
            for slot, _ in self._ended:
                heapq.heappush(self._free, slot)
            self._ended.clear()
        for slot, id in self._ended:
            self._draw(slot, id, "padding", begin, end)
        return len(self._ended)

    def _item(self, item: ItemRecord, begin: float, end: float) -> str:
        key = (item.id, item.index)
        if key not in self._slots:
            self._slots[key] = heapq.heappop(self._free) if self._free else self.timeline.slots
            self.timeline.slots = max(self.timeline.slots, self._slots[key] + 1)
        kind = "decode" if item.computed >= self._prompts[item.id] else "prefill"
        self._draw(self._slots[key], item.id, kind, begin, end)
        self._held[key] = item.computed + item.n
        mine = self._request(item.id)
        if item.tokens:
            mine.answer += len(item.tokens)
            if mine.first != mine.first:
                mine.first = end + self._zero - self._arrived[item.id].arrival
            if key in self._last:
                self.timeline.gaps.append(end - self._last[key])
            self._last[key] = end
        self._serve(item, begin, end)
        return kind

    def _request(self, id: int) -> RequestTimeline:
        tenant = self._arrived[id].more.get("tenant", "")
        return self.timeline.requests.setdefault(id, RequestTimeline(self._prompts[id], tenant))

    def _serve(self, item: ItemRecord, begin: float, end: float) -> None:
        """A token of a prompt counts once, in the step that computes it first."""
        tenant = self._arrived[item.id].more.get("tenant", "")
        prompt = max(0, min(item.computed + item.n, self._prompts[item.id]) - item.computed)
        line = self.timeline.service.setdefault(tenant, [(0.0, 0.0)])
        line.append((end, line[-1][1] + prompt + self._weight * len(item.tokens)))
        if item.id not in self._met:
            self._met.add(item.id)
            self.timeline.queued[tenant] = begin

    def _end(self, key: Key) -> None:
        if key in self._slots:
            self._ended.append((self._slots.pop(key), key[0]))
            self._held.pop(key, None)
            self._last.pop(key, None)

    def _memory(self, step: StepRecord) -> tuple[int, int, int]:
        reserved = step.blocks * self._block
        whole = 0
        for id, _ in self._held:
            most = self._arrived[id].params.get("max_tokens") or self._longest
            whole += min(self._prompts[id] + most, self._longest)
        return reserved, min(sum(self._held.values()), reserved), whole

    def _shares(self, step: StepRecord) -> tuple[float, float, float]:
        """Shares of the machine's limits that the step reached: reading, computing, computing
        padding."""
        if self._needs is None:
            return 0.0, 0.0, 0.0
        work, window = work_of_step(step, self._needs.window), self._needs.window
        padding = work_of_spans(spans_of_ballast(step.ballast), 0, window)
        demand, needed = (self._needs.demand(one) for one in (work, work.minus(padding)))
        seconds, limits = step.end - step.start, self.timeline.limits
        self.timeline.usage.add(demand, seconds, 0.0)
        shares, useful = (_used(one, seconds).shares(limits) for one in (demand, needed))
        compute = shares.get("compute", 0.0)
        return shares.get("read", 0.0), compute, compute - useful.get("compute", 0.0)

    def _draw(self, slot: int, id: int, kind: str, begin: float, end: float) -> None:
        """Lengthen the span of the step before if it was the same, else begin one."""
        number, span = self._open.get((slot, kind), (0, None))
        if span is not None and number == self._number - 1 and span.id == id:
            span.end = end
        else:
            span = SlotSpan(slot, id, kind, begin, end)
            self.timeline.spans.append(span)
        self._open[slot, kind] = (self._number, span)


def _used(demand: StepDemand, seconds: float) -> WorkTotals:
    usage = WorkTotals()
    usage.add(demand, seconds, 0.0)
    return usage


def figures(run: RecordedRun, told: RunTimeline, targets: LatencyTargets) -> dict[str, Any]:
    """Everything that is said of a run in numbers. Milliseconds where a name ends in _ms."""
    moments = told.moments
    rows, padded = sum(m.rows for m in moments), sum(m.padded for m in moments)
    busy = sum(m.end - m.begin for m in moments)

    def over_time(of: Callable[[Moment], int]) -> float:
        return sum(of(m) * (m.end - m.begin) for m in moments)

    reserved = over_time(lambda m: m.reserved)
    used, whole = over_time(lambda m: m.used), over_time(lambda m: m.whole)
    shares = told.usage.shares(told.limits)
    room = run.header.num_blocks * run.config.block_size
    return recorded_runs.request_metrics(run).figures(targets) | {
        "itl_ms": summary.spread([1e3 * gap for gap in told.gaps]),
        "steps": len(moments),
        "busy_s": busy,
        "rows": rows,
        "padding_share": padded / rows if rows else 0.0,
        "sequences_per_step": over_time(lambda m: m.decoding + m.prefilling) / (busy or 1.0),
        "most_running": told.slots,
        "preemptions": told.preemptions,
        "machine": told.usage.achieved
        | {f"{name}_share": shares[name] for name in ("read", "compute") if name in shares},
        "kv": {
            "room": room,
            "most_reserved": max((m.reserved for m in moments), default=0),
            "most_used": max((m.used for m in moments), default=0),
            "waste": 1 - used / reserved if reserved else 0.0,
            "waste_if_whole": 1 - used / whole if whole else 0.0,
            "fullest": max((m.used for m in moments), default=0) / room,
        },
    }


def ideal(lengths: Sequence[tuple[int, int]], batch: int) -> dict[str, float]:
    """Return the most that continuous batching may gain over static, from (prompt, answer) alone.

    steps  of a step that takes as long however full it is: the sum over static batches of their
           longest answer, by the steps that `batch` places need when none stands empty
    rows   of a step that takes as long as its rows: all rows with padding, by those without
    """
    batches = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    longest = [(max(p for p, _ in one), max(o for _, o in one)) for one in batches]
    answers, longest_answer = sum(o for _, o in lengths), max(o for _, o in lengths)
    padded = sum(len(one) * (p + o) for one, (p, o) in zip(batches, longest, strict=True))
    needed = max(answers / batch, longest_answer)
    return {
        "batch": batch,
        "steps": sum(o for _, o in longest) / needed,
        "rows": padded / sum(p + o for p, o in lengths),
    }


def binned(
    moments: Sequence[Moment], of: Callable[[Moment], float], horizon: float, bins: int
) -> list[float]:
    """Means over time of a figure of steps, in so many bins from 0 to `horizon`; 0 between
    steps."""
    width, sums = horizon / bins, [0.0] * bins
    for m in moments:
        value = of(m)
        first, last = int(m.begin / width), min(int(m.end / width), bins - 1)
        for i in range(first, last + 1):
            inside = min(m.end, (i + 1) * width) - max(m.begin, i * width)
            sums[i] += value * max(0.0, inside)
    return [total / width for total in sums]


def service_at(line: Sequence[tuple[float, float]], at: float) -> float:
    """Return how much a tenant was served until this moment."""
    place = bisect_right(line, (at, float("inf")))
    return line[place - 1][1] if place else 0.0


def unfairness(told: RunTimeline) -> float:
    """The largest difference in service between two tenants who both have requests waiting ever
    since the first arrival. 0 for fewer than two tenants."""
    worst = 0.0
    for at in (m.end for m in told.moments):
        served = [
            service_at(told.service[t], at) for t, until in told.queued.items() if at <= until
        ]
        if len(served) > 1:
            worst = max(worst, max(served) - min(served))
    return worst
