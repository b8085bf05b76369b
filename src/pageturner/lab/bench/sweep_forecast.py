"""The planner's answer beside a sweep: each measured point once more in the simulator, where that
can be had: our scheduler, with the step times of a calibration.

Owns the simulated clients, how far a forecast was off, which servers are simulated with which
settings, and what is said where there is nothing to simulate with. Must not know how anything was
measured: it is told lengths alone, of prompts and of answers, and no time.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pageturner.config import settings as configuration
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import scheduler_of
from pageturner.engine.fingerprint import model_mark
from pageturner.errors import EngineFault
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.client import ResponseTimes
from pageturner.lab.bench.sweep import LoadSweep, SweepPoint, SweepResults, SweptServer
from pageturner.lab.bench.sweep_load import (
    PointBounds,
    PointRun,
    SentRequest,
    arrivals,
    point_figures,
    point_seed,
)
from pageturner.lab.simulation import calibration
from pageturner.lab.simulation.recorded_runs import SCHEDULER_OPTIONS
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost, load_calibration
from pageturner.lab.traffic.traffic import OWN, Pieces, TrafficRequest

DEFAULT = Path("calibration.json")  # what `pageturner calibrate` writes unless told otherwise
MAKE = "run `pageturner calibrate {model}`, then give its file here: --calibration calibration.json"
# tokens of prompt and answer of each request, in the order of sending
Lengths = list[tuple[int, int]]


# -- the simulation of a point ---------------------------------------------------------------------


def _requests(lengths: Lengths) -> Iterator[TrafficRequest]:
    """Yield requests of these lengths, over and over; no two have a prefix in common."""
    for number in itertools.count():
        prompt, answer = lengths[number % len(lengths)]
        pieces = Pieces(((OWN + 2 * number, max(prompt, 1)),))
        yield TrafficRequest(pieces, output=None, max_tokens=answer, answer=OWN + 2 * number + 1)


@dataclass(slots=True)
class SimulatedClients:
    """The closed loop of sweep_load.closed_point in simulated time. ended: requests in the order in
    which they were answered; `turn` is (client, how many it had sent before)."""

    lengths: Lengths
    clients: int
    bounds: PointBounds
    ended: list[TrafficRequest] = field(default_factory=list)
    stop: float = float("inf")
    _coming: Iterator[TrafficRequest] = field(init=False)
    _sent: int = 0
    _first: int = 0

    def __post_init__(self) -> None:
        self._coming = _requests(self.lengths)

    @property
    def total(self) -> int:
        return self.clients

    def arrivals(self) -> Iterator[TrafficRequest]:
        return (self._next(client, 0, 0.0) for client in range(self.clients))

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        self.ended.append(request)
        client, number = request.turn or (0, 0)
        self._first += number == 0
        enough = self.bounds.requests and self._sent >= self.clients + self.bounds.requests
        wanted = self._first < self.clients or (end < self.bounds.seconds and not enough)
        if end >= self.bounds.sending or not wanted:
            self.stop = min(self.stop, end)
            return []
        return [self._next(client, number + 1, end)]

    def _next(self, client: int, number: int, at: float) -> TrafficRequest:
        self._sent += 1
        return replace(next(self._coming), arrival=at, turn=(client, number))


@dataclass(slots=True)
class NotedArrivals:
    """Requests at their own times, which notes the order of answers as SimulatedClients does."""

    requests: list[TrafficRequest]
    ended: list[TrafficRequest] = field(default_factory=list)
    stop: float = float("inf")

    @property
    def total(self) -> int:
        return len(self.requests)

    def arrivals(self) -> Iterator[TrafficRequest]:
        return iter(self.requests)

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        self.ended.append(request)
        return []


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """The engine that a calibration is of, with the settings of a server under test."""

    config: EngineConfig
    sizes: KVSizes
    max_model_len: int
    cost: CalibratedCost

    @classmethod
    def of(cls, cost: CalibratedCost, settings: dict[str, Any]) -> SimulatedServer:
        """settings: of its scheduler, other than those that were calibrated."""
        known, sizes, longest = calibration.engine_of(cost)
        config = replace(known, **settings)
        sizes = replace(sizes, blocks=sizes.blocks * known.block_size // config.block_size)
        return cls(config, sizes, config.max_model_len or longest, cost)

    def fitting(self, lengths: Lengths) -> int:
        """Return how many such requests its KV memory holds at once, all at their full length."""
        size = self.config.block_size
        blocks = sum(-(-(prompt + answer) // size) for prompt, answer in lengths)
        fit = self.sizes.blocks * len(lengths) // max(blocks, 1)
        return min(fit, self.sizes.tails // 2) if self.sizes.tails else fit

    def point(
        self,
        over: str,
        at: float,
        lengths: Lengths,
        bounds: PointBounds,
        seed: int,
        targets: dict[str, float],
    ) -> dict[str, Any]:
        """The figures of one run, as sweep_load.point_figures makes them of a measured one. Nothing
        where the engine refuses such requests."""
        if over == "concurrency":
            return self._figures(SimulatedClients(lengths, int(at), bounds), targets)
        times = arrivals(at, bounds, seed)
        asked = [
            replace(one, arrival=when) for when, one in zip(times, _requests(lengths), strict=False)
        ]
        return self._figures(NotedArrivals(asked), targets)

    def _figures(
        self, traffic: SimulatedClients | NotedArrivals, targets: dict[str, float]
    ) -> dict[str, Any]:
        simulator = Simulator(
            lambda: scheduler_of(self.config, self.sizes, self.max_model_len).scheduler,
            self.cost,
            num_blocks=self.sizes.blocks,
        )
        simulator.run(traffic, progress=False)
        found = simulator.metrics
        if found.refused or not traffic.ended:
            return {}
        run = PointRun(0.0, cut=found.end)
        run.stop = min(traffic.stop, found.end)
        each = zip(traffic.ended, found.ttft, found.e2e, found.tokens, strict=True)
        for asked, ttft, e2e, tokens in each:
            begin = asked.arrival
            times = ResponseTimes(begin, begin + e2e, [begin + ttft, begin + e2e], tokens=tokens)
            ramp = asked.turn is not None and asked.turn[1] == 0
            run.sent.append(SentRequest(asked, times, ramp))
        # between first and last token no times were noted
        return point_figures(run, targets) | {"gap_ms_p99": float("nan")}


# -- beside what was measured ----------------------------------------------------------------------


def add_forecasts(found: SweepResults, path: Path | None, model: str, bounds: PointBounds) -> None:
    """Simulate what was measured of our own servers, or of the first server if none was started; or
    say in `found.forecast` how that would be had. path: None: DEFAULT, if it is of this model."""
    how = MAKE.format(model=model or "MODEL")
    if path is None and not (model and DEFAULT.exists()):
        found.forecast = f"Nothing is simulated beside this: {how}"
        return
    try:
        cost = load_calibration(path or DEFAULT)
        if model and model_mark(EngineConfig(model=model)) != cost.engine.get("model"):
            raise EngineFault("calibration", f"{path or DEFAULT} is of another model: {how}")
    except EngineFault as fault:
        found.forecast = f"Nothing is simulated beside this: {fault.message}"
        return
    found.forecast = (
        f"Simulated: our scheduler under a clock of its own, step times from {path or DEFAULT}"
        f" ({cost.steps:,} steps, half of them within {cost.error[0]:.1%}), told the lengths of prompts and"
        " answers alone. HTTP, text and the client, which share the machine, are not in it."
    )
    for server in [one for one in found.servers if one.started is not None] or found.servers[:1]:
        try:
            _add(found, server, cost, bounds)
        except (EngineFault, ValueError) as error:
            found.notes.append(f"{server.name} was not simulated: {error}")


def _add(
    found: SweepResults, server: SweptServer, cost: CalibratedCost, bounds: PointBounds
) -> None:
    engine = SimulatedServer.of(cost, scheduler_settings(server.started or ""))
    lengths: Lengths = []
    for number, sweep in enumerate(found.sweeps):
        points = [
            _point(engine, (number, place), sweep, server.name, bounds, found.targets)
            for place in range(len(sweep.points))
        ]
        if any(point.rounds for point in points):
            found.forecasts[number, server.name] = points
        for point in sweep.points:
            lengths += [pair for one in point.rounds.get(server.name, []) for pair in _lengths(one)]
    if lengths:
        found.forecast += (
            f" The KV memory of {server.name}, {engine.sizes.blocks * engine.config.block_size:,} tokens as"
            f" calibrated, holds about {engine.fitting(lengths):,} of these requests at once."
        )


def _point(
    engine: SimulatedServer,
    place: tuple[int, int],
    sweep: LoadSweep,
    name: str,
    bounds: PointBounds,
    targets: dict[str, float],
) -> SweepPoint:
    """All rounds of one point once more. place: numbers of its sweep and of it."""
    point = sweep.points[place[1]]
    made = SweepPoint(point.at)
    for turn, one in enumerate(point.rounds.get(name, [])):
        lengths = _lengths(one)
        seed = point_seed(*place, turn)
        figures = lengths and engine.point(sweep.over, point.at, lengths, bounds, seed, targets)
        if figures:
            made.rounds.setdefault(name, []).append(figures)
    return made


def _lengths(figures: dict[str, Any]) -> Lengths:
    return [(prompt, answer) for prompt, answer in figures["lengths"]]


def scheduler_settings(flags: str) -> dict[str, Any]:
    """Return the settings of the scheduler that these flags of `pageturner serve` give."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    configuration.add_flags(parser, "engine")
    known, _ = parser.parse_known_args(shlex.split(flags))
    given = configuration.from_flags(known)
    engine = configuration.load(known.config, given).engine
    names = SCHEDULER_OPTIONS if known.config else given["engine"]
    return {name: getattr(engine, name) for name in names if name in SCHEDULER_OPTIONS}
