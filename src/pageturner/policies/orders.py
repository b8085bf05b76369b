"""The queue orders, by name: fcfs, priority, sjf, deadline, adaptive, fair, prefix, programs and
uniboost.

Owns their keys and what single orders remember. Must not touch sequences, blocks or queues
(scheduler/order.py).

Ageing: once a request has waited for `ageing` seconds since it arrived, only requests that arrived
before it stand in front of it, and they have aged too. So from then on nothing can overtake it.
`fair` counts these seconds since its tenant last had anything computed (see fairness.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf, log2

from pageturner.policies.fairness import Tenants
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.programs import AttainedService, Programs
from pageturner.policies.step_time import StepTimeModel
from pageturner.policies.uniboost import boost
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.order import Key, Order
from pageturner.scheduler.types import Sequence

RENEWED = 8  # estimates renewed in a step
RISE = 4.0  # priority classes that `adaptive` gives for waiting until one is aged


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings that an order may know.

    ageing         seconds, at least 0
    output_weight  what a token of the answer costs, in tokens of a prompt
    cached         tokens of a waiting sequence that would not have to be computed
    programs       tells the program that a sequence belongs to
    """

    ageing: float
    output_weight: float
    cached: Callable[[Sequence], int]
    predictor: LengthPredictor
    step_times: StepTimeModel
    programs: Programs

    def __post_init__(self) -> None:
        if not (self.ageing >= 0 and self.output_weight >= 0):
            given = f"{self.ageing} and {self.output_weight}"
            raise ValueError(
                f"ageing takes at least 0 seconds, and a token costs at least 0, not {given}"
            )


class Estimates:
    """A number for each waiting sequence that is dear to find: kept, and in each step found anew
    for the few whose number is oldest. So with a queue of q it is at most q / RENEWED steps old."""

    def __init__(self, find: Callable[[Sequence], float]) -> None:
        self._find = find
        self._known: dict[Sequence, float] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._known

    def __getitem__(self, seq: Sequence) -> float:
        return self._known[seq]

    def begin_step(self, running: Iterable[Sequence], now: float) -> None:
        for seq in list(islice(self._known, RENEWED)):
            del self._known[seq]  # to the end of the line
            self._known[seq] = self._find(seq)

    def queued(self, seq: Sequence) -> None:
        self._known[seq] = self._find(seq)

    def served(self, seq: Sequence, n: int, now: float) -> None:
        self._known.pop(seq, None)

    def ended(self, seq: Sequence, finish: str | None) -> None:
        self._known.pop(seq, None)


def _order_of(rule: Estimates | Adaptive | Tenants, key: Callable[[Sequence, float], Key]) -> Order:
    """Return an order with this key, whose rule hears of the sequences."""
    listener = Listener(queued=rule.queued, served=rule.served, ended=rule.ended)
    return Order(key, rule.begin_step, listener)


def _arrival(seq: Sequence, now: float) -> Key:
    return (seq.request.arrival, seq.request.id)


def _aged(ageing: float, key: Callable[[Sequence, float], Key]) -> Callable[[Sequence, float], Key]:
    """The aged by arrival, then the others by a key, and by arrival among equals."""

    def aged(seq: Sequence, now: float) -> Key:
        request = seq.request
        if now >= request.arrival + ageing:
            return (0, request.arrival, request.id)
        return (1, *key(seq, now), request.arrival, request.id)

    return aged


def _work(context: Context, seq: Sequence) -> float:
    """Return the work that is left, in tokens of a prompt: all that no cache gives, and the rest of
    the answer."""
    answer = context.predictor.length(seq) - seq.generated
    return len(seq.tokens) - context.cached(seq) + context.output_weight * answer


def fcfs(context: Context) -> Order:
    """First come, first served: by arrival, then by id. A preempted sequence keeps its place in
    front. Nothing can overtake a waiting request, so it needs no ageing."""
    return Order(_arrival)


def priority(context: Context) -> Order:
    """The smallest priority first, then first come, first served."""
    return Order(_aged(context.ageing, lambda seq, now: (seq.request.priority,)))


def sjf(context: Context) -> Order:
    """The least predicted work first."""
    work = Estimates(lambda seq: _work(context, seq))
    return _order_of(work, _aged(context.ageing, lambda seq, now: (work[seq],)))


def prefix(context: Context) -> Order:
    """The longest cached prefix first."""
    cached = Estimates(context.cached)
    return _order_of(cached, _aged(context.ageing, lambda seq, now: (-cached[seq],)))


def deadline(context: Context) -> Order:
    """The least slack first: the time left until the request would have to start so as to meet its
    targets. Who cannot meet them any more, or has none, comes behind those who can."""
    latest = Estimates(lambda seq: _latest_start(context, seq))

    def key(seq: Sequence, now: float) -> Key:
        return (0, latest[seq]) if now <= latest[seq] < inf else (1,)

    return _order_of(latest, _aged(context.ageing, key))


def _latest_start(context: Context, seq: Sequence) -> float:
    """The last moment at which starting it meets its targets: min(arrival + ttft_target, deadline -
    what the answer takes) - what the prompt takes. Infinite without a target."""
    request, times, due = seq.request, context.step_times, inf
    if request.ttft_target is not None and not seq.generated:
        due = request.arrival + request.ttft_target
    if request.deadline is not None:
        answer = context.predictor.length(seq) - seq.generated
        due = min(due, request.deadline - answer * times.step)
    return due - times.each * (len(seq.tokens) - context.cached(seq))


class Adaptive:
    """The order by priority + L log2(work / typical work) - RISE waited / ageing, where L is the
    share of those running that are long, that is, have more work than is typical. So the more of
    the batch is long, the more a short request is preferred; in a batch of short ones length does
    not count."""

    def __init__(self, context: Context) -> None:
        self._rise = RISE / context.ageing if context.ageing else 0.0  # classes a second
        self._work = Estimates(lambda seq: log2(1 + _work(context, seq)))
        self._running: dict[Sequence, float] = {}  # log2 work when it joined
        self._typical = 0.0  # the mean of log2 work, of those that came lately
        self._long = 0.0

    def key(self, seq: Sequence, now: float) -> Key:
        request = seq.request
        waited = self._rise * (now - request.arrival)
        return (request.priority + self._long * (self._work[seq] - self._typical) - waited,)

    def begin_step(self, running: Iterable[Sequence], now: float) -> None:
        self._work.begin_step(running, now)
        works = self._running.values()
        self._long = sum(work > self._typical for work in works) / len(works) if works else 0.0

    def queued(self, seq: Sequence) -> None:
        self._running.pop(seq, None)
        self._work.queued(seq)
        new = self._work[seq]
        self._typical += (new - self._typical) * (0.05 if self._typical else 1.0)

    def served(self, seq: Sequence, n: int, now: float) -> None:
        if seq in self._work:
            self._running[seq] = self._work[seq]
            self._work.served(seq, n, now)

    def ended(self, seq: Sequence, finish: str | None) -> None:
        self._running.pop(seq, None)
        self._work.ended(seq, finish)


def adaptive(context: Context) -> Order:
    """Sort by priority, predicted work, waiting time, and what the running batch is like."""
    rule = Adaptive(context)
    return _order_of(rule, _aged(context.ageing, rule.key))


def fair(context: Context) -> Order:
    """The tenant that was served least goes first; first come, first served within a tenant."""
    tenants = Tenants(context.output_weight, context.ageing)
    return _order_of(tenants, tenants.key)


def programs(context: Context) -> Order:
    """The program that was served least goes first."""
    service = AttainedService(context.output_weight, context.programs.name_of)
    key = _aged(context.ageing, lambda seq, now: (service[seq],))
    return Order(key, listener=Listener(served=service.served, ended=context.programs.ended))


def uniboost(context: Context) -> Order:
    """Sort by arrival, less a boost that falls with the work that is known."""
    boosts = Estimates(lambda seq: boost(_known_work(context, seq), context.ageing))

    def key(seq: Sequence, now: float) -> Key:
        return (seq.request.arrival - boosts[seq],)

    return _order_of(boosts, _aged(context.ageing, key))


def _known_work(context: Context, seq: Sequence) -> float:
    """Return the seconds that what is there of it takes, without what a cache gives."""
    tokens = len(seq.tokens) - context.cached(seq)
    return context.step_times.each * tokens + context.step_times.step * seq.generated


ORDERS: dict[str, Callable[[Context], Order]] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": sjf,
    "deadline": deadline,
    "adaptive": adaptive,
    "fair": fair,
    "prefix": prefix,
    "programs": programs,
    "uniboost": uniboost,
}
