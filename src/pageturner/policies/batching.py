"""The batching policies, by name: who gets how many tokens in a step. The default is in
scheduler/batching.py.

Each is a generator that asks for (sequence, n) and is told how many tokens were granted. It must
not touch a sequence, a block or a queue; what it wants beyond asking it says through its View.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from sys import maxsize

from pageturner.policies.reserves import reserve_full
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.step_time import StepTimeModel
from pageturner.scheduler.batching import Asks, Policy, View, chunked
from pageturner.scheduler.types import Sequence

LEAST = (
    16  # tokens of prefill that a step of adaptive_chunk may hold at least, so that prompts get on
)


class AdaptiveChunk:
    """chunked, with token budget and most running sequences steered so that a step takes `target`
    seconds, which is the gap between two tokens of whoever decodes.

    A step of T tokens that took t over target lets the next one have T target / t, at least half.
    One within it that had all tokens allowed lets the next one have up to a tenth more. The most
    running sequences fall likewise by steps that are too long with hardly any prefill, and rise by
    one when a step of all of them leaves a tenth of the target. The first values come from the knee
    of the machine's roofline.
    """

    def __init__(self, target: float, tokens: int, seqs: int, step_times: StepTimeModel) -> None:
        if not target > 0 or tokens < 0 or seqs < 0:
            raise ValueError(
                f"a target takes time, first values are at least 0: {target}, {tokens}, {seqs}"
            )
        self._target, self._step_times = target, step_times
        self._tokens, self._seqs = (
            float(tokens),
            float(seqs),
        )  # allowed; 0: all that the scheduler allows
        self._planned, self._decodes, self._steps = (
            0,
            0,
            0,
        )  # of the last step; how many were measured then

    def __call__(self, v: View) -> Asks:
        running = len(v.decoding) + len(v.prefilling)
        self._tokens = min(self._tokens or v.token_budget_left, v.token_budget_left)
        self._seqs = min(self._seqs or running + v.free_slots, running + v.free_slots)
        if self._step_times.steps > self._steps:
            self._steer(self._step_times.last)
        for s in v.decoding:
            yield s, s.pending
        self._decodes, self._steps = v.granted, self._step_times.steps
        v.limit(max(int(self._tokens) - v.granted, LEAST))
        for s in v.prefilling:
            yield s, s.pending
        room = int(self._seqs) - running
        for s in v.waiting:
            room -= v.slots(s)
            if (room < 0 and v.granted) or not (yield s, s.pending):
                break
        self._planned = v.granted

    def budget(self) -> int:
        """Most tokens that it lets a step have at present."""
        return int(self._tokens) or maxsize

    def _steer(self, took: float) -> None:
        ratio = self._target / took
        if ratio < 1:
            cut = max(0.5, ratio)
            if self._planned - self._decodes <= LEAST:
                self._seqs = max(1.0, self._decodes * cut)
            self._tokens = max(1.0, self._planned * cut)
            return
        if self._planned >= int(self._tokens):
            self._tokens *= min(1.1, ratio)
        if self._decodes >= int(self._seqs) and ratio > 1.1:
            self._seqs += 1


def prefill_first(v: View) -> Asks:
    """Waiting prompts whole as soon as they fit; decodes wait for them. One above the budget runs
    alone."""
    yield from _whole(v, (*v.prefilling, *v.waiting))
    if not v.granted:
        for s in v.decoding:
            yield s, s.pending


def _whole(v: View, prompts: Iterable[Sequence]) -> Asks:
    """Prompts in one piece each, as many as fit the budget, and the first one even if it does
    not."""
    first = True
    for s in prompts:
        n = v.need(s)
        if n > v.token_budget_left and not first:
            return
        v.lift(n)
        if not (yield s, n):
            return
        first = False


def orca(v: View) -> Asks:
    """A token for every decoding sequence and whole prompts beside them; room for all of a request
    is kept from its admission on, whatever `admission` says."""
    for s in v.decoding:
        yield s, s.pending
    yield from _whole(v, (*v.prefilling, *v.waiting))


class ServedRatio:
    """prefill_first, but prompts are let in only when waiting / running exceeds `ratio`, or after
    `steps` steps without a prefill. With nobody running the ratio is infinite."""

    def __init__(self, ratio: float, steps: int) -> None:
        if not ratio >= 0 or steps < 1:
            raise ValueError(
                f"a served ratio is at least 0, its steps at least 1, not {ratio} and {steps}"
            )
        self._ratio = ratio
        self._steps = steps
        self._without = 0  # steps since the last prefill

    def __call__(self, v: View) -> Asks:
        running = len(v.decoding) + len(v.prefilling)
        due = len(v.waiting) > self._ratio * running or self._without >= self._steps
        yield from _whole(v, (*v.prefilling, *(v.waiting if due else ())))
        self._without = 0 if v.granted else self._without + 1
        if not v.granted:
            for s in v.decoding:
                yield s, s.pending


class Static:
    """Wait for `size` requests, pad to the longest, run until the last one ends; nobody joins or
    leaves.

    A batch that stays short starts at `due(since, oldest)`: since when the engine stood without a
    batch, and when the oldest waiting request arrived. Padding rows and finished members are
    computed as ballast. The batch is cut so that every member finds room padded to the longest
    prompt and the longest answer, hence nobody is preempted. The token budget does not apply: a
    batch cannot be split.
    """

    def __init__(self, size: int, due: Callable[[float, float], float]) -> None:
        if size < 1:
            raise ValueError(f"a static batch needs at least one request, not {size}")
        self._size = size
        self._due = due
        self._since: float | None = None
        self._rows = 0  # members of the batch, finished ones too
        self._length = 0  # padded context of the batch

    def __call__(self, v: View) -> Asks:
        if v.decoding or v.prefilling:
            yield from self._decode(v)
        else:
            yield from self._start(v)

    def _start(self, v: View) -> Asks:
        if not v.waiting:
            return
        if self._since is None:
            self._since = v.now
        size = min(self._size, v.free_slots)
        due = self._due(self._since, min(s.request.arrival for s in v.waiting))
        if len(v.waiting) < size and v.now < due:
            v.wake = due
            return
        self._since = None
        batch = self._fitting(v, v.waiting[:size])
        self._rows, self._length, granted = 0, max(len(s.tokens) for s in batch), []
        for s in batch:
            need = v.need(s)  # who joined before may have taken what was cached for this one
            v.lift(need)
            if n := (yield s, need):
                self._rows += v.slots(s)
                granted.append(n)
        for n in granted:
            if n < max(granted):
                v.pad(max(granted) - n, self._length)

    def _fitting(self, v: View, queue: list[Sequence]) -> list[Sequence]:
        """The longest beginning of the queue whose padded KV fits."""
        prompt = answer = slots = 0
        for i, s in enumerate(queue):
            prompt = max(prompt, len(s.tokens))
            answer = max(answer, v.peak(s) - len(s.tokens))
            slots += v.slots(s)
            if i and slots > min(v.free_slots, v.max_concurrent(min(prompt + answer, v.context))):
                return queue[:i]
        return queue

    def _decode(self, v: View) -> Asks:
        v.lift(self._rows)
        self._length = min(self._length + 1, v.context)
        running = (*v.decoding, *v.prefilling)
        for _ in range(self._rows - len(running)):
            v.pad(1, self._length)
        for s in running:
            yield s, s.pending


def make_static(options: SchedulerConfig, _: StepTimeModel) -> Policy:
    """Waits for a full batch. The patience is there only so that the last requests of all are
    answered: it counts while the engine stands idle, never while a batch runs."""
    patience = options.static_patience
    return _batched(
        Static(options.static_batch, lambda since, oldest: max(since, oldest) + patience)
    )


def make_window(options: SchedulerConfig, _: StepTimeModel) -> Policy:
    """Dynamic batching: a full batch, or whoever is there when the oldest has waited for the
    window."""
    window = options.window_ms / 1000
    return _batched(Static(options.static_batch, lambda since, oldest: oldest + window))


def _batched(asks: Static) -> Policy:
    return Policy(asks, forecastable=False, interruptible=False, awaits_prefixes=False)


def make_chunked(options: SchedulerConfig, _: StepTimeModel) -> Policy:
    most = options.max_prefill_beside_decode
    return Policy(
        partial(chunked, max_prefill_tokens=most) if most > 0 else chunked,
        steady=True,
        bounded=True,
    )


def make_adaptive_chunk(options: SchedulerConfig, step_times: StepTimeModel) -> Policy:
    asks = AdaptiveChunk(options.tpot_ms / 1000, options.knee_tokens, options.knee_seqs, step_times)
    return Policy(asks, bounded=True, budget=asks.budget)


def make_served_ratio(options: SchedulerConfig, _: StepTimeModel) -> Policy:
    return Policy(ServedRatio(options.served_ratio, options.served_steps), mixes=False)


# name -> the policy, given the settings and how long steps take
POLICIES: dict[str, Callable[[SchedulerConfig, StepTimeModel], Policy]] = {
    "chunked": make_chunked,
    "adaptive_chunk": make_adaptive_chunk,
    "prefill_first": lambda *_: Policy(prefill_first, mixes=False, steady=True),
    "served_ratio": make_served_ratio,
    "orca": lambda *_: Policy(orca, steady=True, awaits_prefixes=False, reserve=reserve_full),
    "window": make_window,
    "static": make_static,
}
