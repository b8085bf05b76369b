"""Replicas that end and begin in a simulation: failures, drains, autoscaling, and streams that
move.

Owns when replicas end and begin, and the figures of the streams that move then. The rule of
autoscaling is router/autoscaling.py's, with the delays around it that Ray Serve has. Must not know
how requests are answered: the simulator (simulator.py) calls a `Changes` and is the `Cluster` that
it acts on.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import msgspec

from pageturner.errors import bad_setting
from pageturner.lab.bench.request_metrics import LatencyTargets, RequestClock
from pageturner.lab.reporting import summary
from pageturner.lab.simulation.fleet import SimulatedFleet, fleet_of
from pageturner.router.autoscaling import GOAL, GoodputPolicy

MAX_EVENTS = 1_000_000  # lines of a file
INTERVAL_S = 1.0  # the rule of autoscaling is asked this often
WINDOW_S = 60.0  # the rule is told of the answers of so many seconds


class Cluster(Protocol):
    """The simulator as a change sees it. Replicas are numbered through all fleets."""

    @property
    def fleets(self) -> Sequence[SimulatedFleet]: ...

    @property
    def held(self) -> int:
        """Requests that no replica takes now."""

    def take_away(self, number: int, now: float) -> None:
        """The replica ends, with all that it has; its streams go on elsewhere."""

    def bring_back(self, number: int, now: float) -> None:
        """The replica takes requests, with an empty cache."""


@dataclass(slots=True)
class StreamMoves:
    """The streams of replicas that end. `delay` seconds later they go on at their next token, whose
    KV is computed again but for what is cached there; without `move` they are asked for again from
    the beginning."""

    move: bool = True
    delay: float = 0.1
    moved: int = 0
    restarted: int = 0
    lost_tokens: int = 0
    recomputed: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))

    def leaves(self, clock: RequestClock) -> None:
        """The replica of this stream has ended."""
        if not clock.tokens:
            return
        clock.moves += 1
        if self.move:
            self.moved += 1
            return
        self.restarted += 1
        self.lost_tokens += clock.tokens
        clock.begin_again()

    def ended(self, clock: RequestClock, recomputed: int) -> None:
        """The stream was answered after all."""
        if clock.moves:
            self.recomputed += recomputed
            self.gaps.append(clock.gap)

    def figures(self) -> dict[str, Any]:
        """Counts of streams and tokens; longest_gap_ms is of the streams whose replica ended."""
        return {
            "streams_moved": self.moved,
            "streams_restarted": self.restarted,
            "tokens_lost": self.lost_tokens,
            "tokens_recomputed": self.recomputed,
            "longest_gap_ms": summary.spread([1e3 * gap for gap in self.gaps]),
        }


class EventQueue:
    """Pairs of a replica and what happens to it, by time; of equal times the first that was
    pushed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, str]] = []
        self._pushed = 0

    @property
    def at(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def push(self, at: float, replica: int, event: str) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, replica, event))

    def pop(self) -> tuple[float, int, str]:
        at, _, replica, event = heapq.heappop(self._heap)
        return at, replica, event

    def expects(self, event: str) -> bool:
        return any(what == event for *_, what in self._heap)


class Changes:
    """Decides which replicas end and begin: base of the two ways to decide it."""

    def __init__(self) -> None:
        self._queue = EventQueue()

    @property
    def at(self) -> float:
        """Seconds of the next change, inf where none will come."""
        return self._queue.at

    @property
    def returns(self) -> bool:
        """Return whether a replica that is away now will take requests again."""
        return self._queue.expects("start")

    def begin(self, cluster: Cluster, now: float) -> None:
        """Called before the first request, which comes at `now`."""

    def happen(self, cluster: Cluster) -> None:
        """Do what was announced for `at`."""

    def answered(self, number: int, clock: RequestClock, now: float) -> None:
        """A request of this replica has ended."""

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """The figures of the changes between these times."""
        return {}


# -- failures --------------------------------------------------------------------------------------


class ReplicaEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event `at` seconds behind the first request. end: the replica is gone at once; drain: it
    takes no more requests, and ends a while later; start: it is there again, with an empty
    cache."""

    at: float
    replica: int
    event: Literal["end", "drain", "start"]


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures to simulate.

    per_hour  failures of one replica in an hour, on average, at times without memory
    events    more, at given times
    back      seconds after which a replica that failed is there again
    grace     seconds that a drained replica has for what it is answering
    move      whether streams go on elsewhere, or are asked for again
    delay     seconds until they are there
    """

    per_hour: float = 0.0
    events: tuple[ReplicaEvent, ...] = ()
    back: float = 60.0
    grace: float = 30.0
    move: bool = True
    delay: float = 0.1
    seed: int = 0


def read_events(path: Path, replicas: int) -> tuple[ReplicaEvent, ...]:
    """The lines of a JSONL file: {"at": 12.5, "replica": 3, "event": "end"}.
    EngineFault('bad_setting')."""
    found = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number > MAX_EVENTS:
                    raise bad_setting(f"{path} has more than {MAX_EVENTS:,} lines")
                if line.strip():
                    found.append(_event(line, replicas, f"{path}:{number}"))
    except OSError as error:
        raise bad_setting(f"cannot read {path}: {error.strerror}") from error
    return tuple(found)


def _event(line: bytes, replicas: int, where: str) -> ReplicaEvent:
    try:
        event = msgspec.json.decode(line, type=ReplicaEvent)
    except msgspec.DecodeError as error:
        raise bad_setting(f"{where}: {error}") from error
    if not (0 <= event.at < float("inf") and 0 <= event.replica < replicas):
        raise bad_setting(f"{where}: at is 0 or more, and replicas are 0 to {replicas - 1:,}")
    return event


class FailingReplicas(Changes):
    """Changes by `failures`, of so many replicas."""

    def __init__(self, failures: Failures, replicas: int) -> None:
        super().__init__()
        self._failures = failures
        self._replicas = replicas
        self._dice = random.Random(failures.seed)
        self._ended = 0
        self._drained = 0

    def begin(self, cluster: Cluster, now: float) -> None:
        for event in self._failures.events:
            self._queue.push(now + event.at, event.replica, event.event)
        self._next_failure(now)

    def happen(self, cluster: Cluster) -> None:
        now, number, event = self._queue.pop()
        fleet = fleet_of(cluster.fleets, number)
        if event == "fail":
            self._next_failure(now)
        if event == "start":
            cluster.bring_back(number, now)
        elif event == "drain" and fleet.there(number):
            self._drained += 1
            fleet.close(number)
            self._queue.push(now + self._failures.grace, number, "drained")
        elif event == "drained" and not fleet.there(number):
            cluster.take_away(number, now)
        elif event in ("end", "fail") and fleet.there(number):
            self._ended += 1
            cluster.take_away(number, now)
            if event == "fail":
                self._queue.push(now + self._failures.back, number, "start")

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        return {"replicas_failed": self._ended, "replicas_drained": self._drained}

    def _next_failure(self, now: float) -> None:
        """Failures of all replicas together; each is hit equally often, also while it is away."""
        if rate := self._failures.per_hour * self._replicas / 3600:
            at = now + self._dice.expovariate(rate)
            self._queue.push(at, self._dice.randrange(self._replicas), "fail")


# -- autoscaling -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds and seconds.

    least, most  replicas
    start        until a new replica takes requests
    up, down     for which one more, or one less, must be asked for
    grace        that a replica which is taken away has for what it is answering
    goal         see GoodputPolicy
    """

    least: int
    most: int
    start: float = 60.0
    up: float = 10.0
    down: float = 300.0
    grace: float = 30.0
    goal: float = GOAL


class ScaledReplicas(Changes):
    """Changes by how many requests meet their targets. slots: sequences in a step of each
    replica."""

    returns = True  # a replica is always there, or it starts

    def __init__(self, scaling: Autoscaling, targets: LatencyTargets, slots: int) -> None:
        super().__init__()
        self._scaling = scaling
        self._targets = targets
        self._slots = slots
        self._rule = GoodputPolicy(scaling.goal)
        self._state: dict[str, Any] = {}  # what the rule has learned
        self._answers: dict[int, deque[tuple[float, bool]]] = {}
        self._paid: dict[int, float] = {}  # since when, of those that are there or start
        self._leaving: dict[int, float] = {}  # until when they may answer
        self._asked = (0, 0.0)  # what the rule asks for, one more or one less, since when
        self._seconds = 0.0
        self._most = self._added = self._removed = 0

    def begin(self, cluster: Cluster, now: float) -> None:
        self._most = self._scaling.least
        self._paid = dict.fromkeys(range(self._most), now)
        for number in range(self._most, self._scaling.most):
            cluster.fleets[-1].close(number)
        self._queue.push(now + INTERVAL_S, -1, "ask")

    def happen(self, cluster: Cluster) -> None:
        now, number, event = self._queue.pop()
        if event == "ask":
            self._let_go(cluster, now)
            self._decide(cluster, now)
            self._queue.push(now + INTERVAL_S, -1, "ask")
        elif number in self._paid:  # nobody has taken it away meanwhile
            cluster.bring_back(number, now)

    def answered(self, number: int, clock: RequestClock, now: float) -> None:
        self._answers.setdefault(number, deque()).append((now, self._targets.met_by(clock)))

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """replica_seconds: from when a replica is asked for until it is gone, of all of them."""
        seconds = self._seconds + sum(max(end - since, 0.0) for since in self._paid.values())
        return {
            "replica_seconds": seconds,
            "replicas_mean": seconds / max(end - begin, 1e-9),
            "replicas_most": self._most,
            "replicas_added": self._added,
            "replicas_removed": self._removed,
        }

    def _decide(self, cluster: Cluster, now: float) -> None:
        scaling, there = self._scaling, len(self._paid) - len(self._leaving)
        wanted = min(max(self._wanted(cluster, there, now), scaling.least), scaling.most)
        step = (wanted > there) - (wanted < there)
        if step != self._asked[0]:
            self._asked = (step, now)
        waited = now - self._asked[1]
        if step > 0 and waited >= scaling.up:
            self._asked = (0, now)
            self._add(now)
        elif step < 0 and waited >= scaling.down:
            self._asked = (0, now)
            self._remove(cluster, now)

    def _wanted(self, cluster: Cluster, there: int, now: float) -> int:
        """The number of replicas by the rule, which is told what replicas tell Serve."""
        fleet = cluster.fleets[-1]
        metrics: dict[str, dict[int, float]] = {"met": {}, "answers": {}, "open": {}, "busy": {}}
        for number in filter(fleet.there, self._paid):
            answers = self._answers.get(number, deque())
            while answers and answers[0][0] < now - WINDOW_S:
                answers.popleft()
            metrics["met"][number] = sum(met for _, met in answers)
            metrics["answers"][number] = len(answers)
            metrics["open"][number] = fleet.open_on(number)
            metrics["busy"][number] = fleet.open_on(number) / self._slots
        wanted, self._state = self._rule(
            SimpleNamespace(
                current_num_replicas=there,
                aggregated_metrics=metrics,
                total_queued_requests=cluster.held,
                policy_state=self._state,
            )
        )
        return wanted

    def _add(self, now: float) -> None:
        for number in range(self._scaling.most):
            if number not in self._paid:
                self._paid[number] = now
                self._added += 1
                self._most = max(self._most, len(self._paid))
                self._queue.push(now + self._scaling.start, number, "start")
                return
        # all places are taken, some by replicas that leave

    def _remove(self, cluster: Cluster, now: float) -> None:
        """Take away the replica with the least to do; of equal ones the newest."""
        fleet = cluster.fleets[-1]
        staying = [n for n in self._paid if n not in self._leaving and fleet.there(n)]
        number = min(staying, key=lambda n: (fleet.open_on(n), -self._paid[n], -n))
        fleet.close(number)
        self._leaving[number] = now + self._scaling.grace
        self._removed += 1

    def _let_go(self, cluster: Cluster, now: float) -> None:
        """End the replicas that leave and have nothing to do, or had their time."""
        for number, until in list(self._leaving.items()):
            if now >= until or not cluster.fleets[-1].open_on(number):
                cluster.take_away(number, now)
                del self._leaving[number]
                self._seconds += now - self._paid.pop(number)
                self._answers.pop(number, None)
