"""An engine on the bench: loaded once, driven under one load after another, its step log read back
each time.

Owns time, arrivals and whose turn it is, and the log of each run. Must not know what is made of a
run, nor where its requests come from.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine
from pageturner.engine.engine_factory import LoadedEngine, engine_again, make_engine
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.simulation import recorded_runs
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.traffic.traffic import OpenLoop
from pageturner.progress import Progress
from pageturner.request import Request


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
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self._at

    def sleep(self, until: float) -> None:
        self._at = max(self._at, until)


def drive(engine: Engine, requests: list[Request], clock: Clock, told: Callable[[], None]) -> None:
    """Submit each request at its arrival, in seconds from now, and step until all are answered;
    `told` at the end of each answer. The engine's own clock must be this one.
    EngineFault('workload') for a request that is refused or fails."""
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
                    raise EngineFault(
                        "workload", f"request {event.id} failed: {event.failure.message}"
                    )
                if event.finish is not None:
                    told()
        # None after a step that computed something
        times = [engine.wake] if engine.has_work else []
        if None not in times:
            clock.sleep(
                min(
                    [*(at for at in times if at), *(one.arrival for one in coming[-1:])],
                    default=now,
                )
            )


@dataclass(frozen=True, slots=True)
class EngineBench:
    """A loaded engine, put together again for each run: the scheduler may have other settings
    then."""

    built: LoadedEngine
    config: EngineConfig
    clock: Clock = field(default_factory=WallClock)

    @classmethod
    def load(cls, config: EngineConfig) -> EngineBench:
        """This machine, this model. Drafts are off: how far they help depends on the texts."""
        return cls(make_engine(replace(config, step_log="", speculation="off")), config)

    def run(
        self,
        requests: list[Request],
        config: EngineConfig | None = None,
        *,
        log: Path | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> RecordedRun:
        """Send all at their arrivals, step until all are answered; what the step log says of it.

        config  settings of the scheduler, other than the engine's own; blocks have the same size
        log     where the step log stays; None: it is only read
        told    called at the end of each answer

        EngineFault('bad_setting') for settings that do not go together, 'step_log' for a disk too
        slow.
        """
        with ExitStack() as stack:
            path = log or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "steps"
            try:
                engine = engine_again(
                    self.built, replace(config or self.config, step_log=str(path))
                )
            except ValueError as error:
                raise bad_setting(str(error)) from error
            engine.clock = self.clock.now
            try:
                drive(engine, requests, self.clock, told)
            finally:
                engine.close()
            run = recorded_runs.last_run(path)
        if run.lost:
            raise EngineFault(
                "step_log", f"the disk of {path} is too slow: {run.lost} records were lost"
            )
        return run

    def measure(
        self, traffic: OpenLoop, config: EngineConfig | None = None, *, progress: bool | None = None
    ) -> RecordedRun:
        """Send the traffic, with a line of progress that has its name."""
        requests, done = traffic.engine_requests(), itertools.count(1)
        with Progress(traffic.name, len(requests), enabled=progress) as line:
            return self.run(requests, config, told=lambda: line.update(next(done)))
