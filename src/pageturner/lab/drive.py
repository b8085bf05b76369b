"""Requests handed to an engine at their arrivals, on the machine's clock or on one that is only told.

Owns whose turn it is: time, arrivals, steps. Must not know what becomes of the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pageturner.core.types import Request
from pageturner.errors import EngineFault
from pageturner.runtime.engine import Engine


class Clock(Protocol):
    """Seconds; `sleep` until a time at the latest."""

    def now(self) -> float: ...

    def sleep(self, until: float) -> None: ...


class WallClock:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))


class SimulatedClock:
    """Stands still but when told."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self._at

    def sleep(self, until: float) -> None:
        self._at = max(self._at, until)


def drive(engine: Engine, requests: list[Request], clock: Clock, told: Callable[[], None]) -> None:
    """Submit each request at its arrival, in seconds from now, and step until all are answered; `told` at the
    end of each answer. The engine's own clock must be this one. EngineFault('workload') for a request that is
    refused or fails."""
    begin = clock.now()
    coming = [replace(request, arrival=begin + request.arrival) for request in reversed(requests)]
    while coming or engine.has_work:
        now = clock.now()
        while coming and coming[-1].arrival <= now:
            for event in engine.submit(coming.pop()):
                reason = event.failure.message if event.failure else "no reason"
                raise EngineFault("workload", f"request {event.id} was refused: {reason}")
        if engine.has_work:
            for event in engine.step():
                if event.failure is not None:
                    raise EngineFault("workload", f"request {event.id} failed: {event.failure.message}")
                if event.finish is not None:
                    told()
        times = [engine.wake] if engine.has_work else []  # None after a step that computed something
        if None not in times:
            clock.sleep(
                min([*(at for at in times if at), *(one.arrival for one in coming[-1:])], default=now)
            )
