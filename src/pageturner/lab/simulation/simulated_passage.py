"""A request between replicas, and what all replicas together did.

Owns what travels in a simulation, and the sums. Must not know who runs the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pageturner.lab.bench.request_metrics import RequestClock
from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.request import Request, Resume


@dataclass(frozen=True, slots=True)
class Coming:
    """A request on its way to a replica. clock: its times; at: seconds; computed: its KV comes with it, to
    `replica` where it was chosen; again: its replica has ended, and it was counted before."""

    asked: TrafficRequest
    clock: RequestClock
    at: float
    computed: bool = False
    replica: int = -1
    again: bool = False

    def request(self, id: int) -> Request:
        """As an engine gets it, with the tokens that it has already."""
        made = self.asked.engine_request(id)
        if not self.clock.tokens:
            return made
        return replace(
            made, resume=(Resume(0, tuple(self.asked.answer_tokens(0, self.clock.tokens))),)
        )


@dataclass(slots=True)
class ReplicaUsage:
    """Sums over all replicas: seconds busy, steps, the share of KV blocks in use, integrated over busy time,
    and the most requests that one of them had at a time."""

    busy: float = 0.0
    steps: int = 0
    leaps: int = 0
    blocks: float = 0.0
    fullest: float = 0.0
    most_open: int = 0

    def add(self, seconds: float, steps: int, share: float) -> None:
        self.busy += seconds
        self.steps += steps
        self.blocks += seconds * share
        self.fullest = max(self.fullest, share)
