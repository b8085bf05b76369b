"""The points of a sweep as the simulator forecasts them: our scheduler, with the step times of a
calibration.

Owns the simulated clients and how far a forecast was off. Must not know how anything was measured:
it is told lengths alone, of prompts and of answers, and no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import scheduler_of
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.client import ResponseTimes
from pageturner.lab.bench.sweep_load import (
    PointBounds,
    PointRun,
    SentRequest,
    arrivals,
    point_figures,
)
from pageturner.lab.simulation import calibration
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OWN, OpenLoop, Pieces, Traffic, TrafficRequest

Lengths = list[
    tuple[int, int]
]  # tokens of prompt and answer of each request, in the order of sending


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
    _coming: Iterator[TrafficRequest] = field(default_factory=lambda: iter(()))
    _sent: int = 0
    _first: int = 0

    @property
    def total(self) -> int:
        return self.clients

    def arrivals(self) -> Iterator[TrafficRequest]:
        self._coming = _requests(self.lengths)
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
class _Noting:
    """An open loop that notes the order of answers."""

    loop: OpenLoop
    ended: list[TrafficRequest] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.loop.total

    def arrivals(self) -> Iterator[TrafficRequest]:
        return self.loop.arrivals()

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
            clients = SimulatedClients(lengths, int(at), bounds)
            return self._figures(clients, clients, targets)
        times = arrivals(at, bounds, seed)
        asked = [
            replace(one, arrival=when) for when, one in zip(times, _requests(lengths), strict=False)
        ]
        noting = _Noting(OpenLoop(asked))
        return self._figures(noting, noting, targets)

    def _figures(
        self, traffic: Traffic, order: SimulatedClients | _Noting, targets: dict[str, float]
    ) -> dict[str, Any]:
        simulator = Simulator(
            lambda: scheduler_of(self.config, self.sizes, self.max_model_len).scheduler,
            self.cost,
            num_blocks=self.sizes.blocks,
        )
        simulator.run(traffic, progress=False)
        found = simulator.metrics
        if found.refused or not order.ended:
            return {}
        run = PointRun(0.0, cut=found.end)
        run.stop = min(order.stop if isinstance(order, SimulatedClients) else found.end, found.end)
        each = zip(order.ended, found.ttft, found.e2e, found.tokens, strict=True)
        for asked, ttft, e2e, tokens in each:
            begin = asked.arrival
            times = ResponseTimes(begin, begin + e2e, [begin + ttft, begin + e2e], tokens=tokens)
            ramp = asked.turn is not None and asked.turn[1] == 0
            run.sent.append(SentRequest(asked, times, ramp))
        # between first and last token no times were noted
        return point_figures(run, targets) | {"gap_ms_p99": float("nan")}
