"""Replicas that are added and taken away in a simulation, by the rule that decides so under Ray Serve.

Owns what the rule is told and the delays around it, as Serve has them. The rule is router/autoscaling.py's.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pageturner.lab.bench.request_metrics import LatencyTargets, RequestClock
from pageturner.lab.simulation.simulated_turnover import Cluster
from pageturner.router.autoscaling import GOAL, GoodputPolicy

EVERY = 1.0  # seconds from one question to the next
WINDOW = 60.0  # seconds of answers that the rule is told of


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds and seconds.

    least, most  replicas
    start        until a new replica takes requests
    up, down     for which one more, or one less, must be asked for
    grace        that one which is taken away has for what it is answering
    goal         see GoodputPolicy
    """

    least: int
    most: int
    start: float = 60.0
    up: float = 10.0
    down: float = 300.0
    grace: float = 30.0
    goal: float = GOAL


class ScaledReplicas:
    """Changes, by how many requests meet their targets. slots: places in a step of each replica."""

    def __init__(self, scaling: Autoscaling, targets: LatencyTargets, slots: int) -> None:
        self._scaling, self._targets, self._slots = scaling, targets, slots
        self._rule = GoodputPolicy(scaling.goal)
        self._state: dict[str, Any] = {}  # what the rule has learned
        self._answers: dict[int, deque[tuple[float, bool]]] = {}
        self._queue: list[
            tuple[float, int, int]
        ] = []  # (at, order, replica to start, or -1: ask the rule)
        self._order = 0
        self._paid: dict[int, float] = {}  # since when, of those that are there or start
        self._leaving: dict[int, float] = {}  # until when they may answer
        self._asked = (0, 0.0)  # what the rule asks for, one more or one less, since when
        self._seconds = 0.0
        self._most = self._added = self._removed = 0

    @property
    def at(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    @property
    def returns(self) -> bool:
        return True  # there is always one, or it starts

    def begin(self, cluster: Cluster, now: float) -> None:
        for number in range(self._scaling.most):
            if number < self._scaling.least:
                self._paid[number] = now
            else:
                cluster.fleets[-1].close(number)
        self._most = self._scaling.least
        self._push(now + EVERY, -1)

    def happen(self, cluster: Cluster) -> None:
        now, _, number = heapq.heappop(self._queue)
        if number >= 0:
            if number in self._paid:  # nobody has taken it away meanwhile
                cluster.bring_back(number, now)
            return
        self._let_go(cluster, now)
        self._decide(cluster, now)
        self._push(now + EVERY, -1)

    def answered(self, number: int, clock: RequestClock, now: float) -> None:
        tpot = clock.tpot
        met = self._targets.met(clock.first - clock.arrival, 0.0 if tpot != tpot else tpot)
        self._answers.setdefault(number, deque()).append((now, met))

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
        there = len(self._paid) - len(self._leaving)
        wanted = min(
            max(self._wanted(cluster, there, now), self._scaling.least), self._scaling.most
        )
        step = (wanted > there) - (wanted < there)
        if step != self._asked[0]:
            self._asked = (step, now)
        if not step or now - self._asked[1] < (
            self._scaling.up if step > 0 else self._scaling.down
        ):
            return
        self._asked = (0, now)
        if step > 0:
            self._add(now)
        else:
            self._remove(cluster, now)

    def _wanted(self, cluster: Cluster, there: int, now: float) -> int:
        """What the rule says, told what replicas tell Serve."""
        fleet = cluster.fleets[-1]
        told: dict[str, dict[int, float]] = {"met": {}, "answers": {}, "open": {}, "busy": {}}
        for number in self._paid:
            if fleet.there(number):
                told["met"][number], told["answers"][number] = self._counted(number, now)
                told["open"][number] = fleet.open_on(number)
                told["busy"][number] = fleet.open_on(number) / self._slots
        wanted, self._state = self._rule(
            SimpleNamespace(
                current_num_replicas=there,
                aggregated_metrics=told,
                total_queued_requests=cluster.held,
                policy_state=self._state,
            )
        )
        return wanted

    def _counted(self, number: int, now: float) -> tuple[int, int]:
        """The last minute's answers of a replica: those within the targets, and all."""
        answers = self._answers.get(number, deque())
        while answers and answers[0][0] < now - WINDOW:
            answers.popleft()
        return sum(met for _, met in answers), len(answers)

    def _add(self, now: float) -> None:
        free = (number for number in range(self._scaling.most) if number not in self._paid)
        number = next(free, None)
        if number is None:
            return  # all places are taken, some by replicas that leave
        self._paid[number] = now
        self._added += 1
        self._most = max(self._most, len(self._paid))
        self._push(now + self._scaling.start, number)

    def _remove(self, cluster: Cluster, now: float) -> None:
        """The one with the least to do; of equal ones the newest."""
        fleet = cluster.fleets[-1]
        staying = [
            number for number in self._paid if number not in self._leaving and fleet.there(number)
        ]
        number = min(staying, key=lambda one: (fleet.open_on(one), -self._paid[one], -one))
        fleet.close(number)
        self._leaving[number] = now + self._scaling.grace
        self._removed += 1

    def _let_go(self, cluster: Cluster, now: float) -> None:
        """Those that leave and have nothing to do, or had their time."""
        for number, until in list(self._leaving.items()):
            if now >= until or not cluster.fleets[-1].open_on(number):
                cluster.take_away(number, now)
                del self._leaving[number]
                self._seconds += now - self._paid.pop(number)
                self._answers.pop(number, None)

    def _push(self, at: float, number: int) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, number))
