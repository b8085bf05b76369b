"""Replicas that fail or are drained in a simulation: at given times, or so many times an hour.

Owns when, and when they are back. What becomes of their streams is simulated_turnover.py's.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pageturner.errors import EngineFault
from pageturner.lab.bench.request_metrics import RequestClock
from pageturner.lab.simulation.simulated_fleet import fleet_of
from pageturner.lab.simulation.simulated_turnover import Cluster

MOST_EVENTS = 1_000_000  # lines of a file
Kind = Literal["end", "drain", "start"]


class ReplicaEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to a replica, `at` seconds behind the first request. end: it is gone at once; drain: it
    takes no more requests, and ends a while later; start: it is there again, with an empty cache."""

    at: float
    replica: int
    event: Kind


@dataclass(frozen=True, slots=True)
class Failures:
    """What is to go wrong.

    per_hour  failures of one replica in an hour, on average, at times without memory
    events    more, at given times
    back      seconds after which a replica that failed is there again
    grace     seconds that a drained one has for what it is answering
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
    """The lines of a JSONL file: {"at": 12.5, "replica": 3, "event": "end"}. EngineFault('bad_setting')."""
    found = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_event(line, replicas, f"{path}:{number}"))
                if number >= MOST_EVENTS:
                    raise EngineFault("bad_setting", f"{path} has more than {MOST_EVENTS:,} lines")
    except OSError as error:
        raise EngineFault("bad_setting", f"cannot read {path}: {error.strerror}") from error
    return tuple(found)


def _event(line: bytes, replicas: int, where: str) -> ReplicaEvent:
    try:
        one = msgspec.json.decode(line, type=ReplicaEvent)
    except msgspec.DecodeError as error:
        raise EngineFault("bad_setting", f"{where}: {error}") from error
    if not (0 <= one.at < float("inf") and 0 <= one.replica < replicas):
        message = f"{where}: at is 0 or more, and replicas are 0 to {replicas - 1:,}"
        raise EngineFault("bad_setting", message)
    return one


class FailingReplicas:
    """Changes, by what is to go wrong with so many replicas."""

    def __init__(self, failures: Failures, replicas: int) -> None:
        self._failures, self._replicas = failures, replicas
        self._dice = random.Random(failures.seed)
        self._queue: list[tuple[float, int, int, str]] = []  # (at, order, replica, what)
        self._order = 0
        self._ended = 0
        self._drained = 0

    @property
    def at(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    @property
    def returns(self) -> bool:
        return any(what == "start" for _, _, _, what in self._queue)

    def begin(self, cluster: Cluster, now: float) -> None:
        for one in self._failures.events:
            self._push(now + one.at, one.replica, one.event)
        self._next_failure(now)

    def happen(self, cluster: Cluster) -> None:
        now, _, number, what = heapq.heappop(self._queue)
        fleet = fleet_of(cluster.fleets, number)
        if what == "fail":
            self._next_failure(now)
        if what == "start":
            cluster.bring_back(number, now)
        elif what == "drain" and fleet.there(number):
            self._drained += 1
            fleet.close(number)
            self._push(now + self._failures.grace, number, "drained")
        elif what == "drained" and not fleet.there(number):
            cluster.take_away(number, now)
        elif what in ("end", "fail") and fleet.there(number):
            self._ended += 1
            cluster.take_away(number, now)
            if what == "fail":
                self._push(now + self._failures.back, number, "start")

    def answered(self, number: int, clock: RequestClock, now: float) -> None:
        """Of no interest here."""

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        return {"replicas_failed": self._ended, "replicas_drained": self._drained}

    def _next_failure(self, now: float) -> None:
        """Of all replicas together; it meets each equally often, and does nothing to one that is away."""
        if rate := self._failures.per_hour * self._replicas / 3600:
            at = now + self._dice.expovariate(rate)
            self._push(at, self._dice.randrange(self._replicas), "fail")

    def _push(self, at: float, number: int, what: str) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, number, what))
