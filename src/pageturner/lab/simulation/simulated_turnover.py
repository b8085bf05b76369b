"""Replicas that come and go in a simulation: what becomes of their streams, and what an idle one keeps.

Owns the figures of moved streams, what is kept of a replica that sleeps, and what the simulator asks of
whoever decides that a replica ends (simulated_failures.py, simulated_autoscaling.py). Must not know time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pageturner.lab.bench.request_metrics import RequestClock
from pageturner.lab.reporting import summary
from pageturner.lab.simulation.simulated_fleet import SimulatedFleet, bring_up
from pageturner.scheduler.scheduler import Scheduler

MOST_AWAKE = 4096  # replicas with a scheduler; of more, those without requests keep the keys of their KV alone
COUNTERS = ("prompt_tokens", "cached_tokens", "preemptions", "recomputed_tokens")


class Cluster(Protocol):
    """What a change may ask of the simulator. Replicas are numbered through all fleets."""

    @property
    def fleets(self) -> Sequence[SimulatedFleet]: ...

    @property
    def held(self) -> int:
        """Requests that no replica takes now."""

    def take_away(self, number: int, now: float) -> None:
        """The replica ends, with all that it has; its streams go on elsewhere."""

    def bring_back(self, number: int, now: float) -> None:
        """The replica takes requests, with an empty cache."""


class Changes(Protocol):
    """Whoever says which replicas end and begin. at: seconds of the next change, inf where none will come;
    returns: whether one of those that are away will take requests again."""

    @property
    def at(self) -> float: ...

    @property
    def returns(self) -> bool: ...

    def begin(self, cluster: Cluster, now: float) -> None:
        """Before the first request, which comes at `now`."""

    def happen(self, cluster: Cluster) -> None:
        """What was announced for `at`."""

    def answered(self, number: int, clock: RequestClock, now: float) -> None:
        """A request of this replica has ended."""

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """What came of it between these times."""


@dataclass(slots=True)
class StreamMoves:
    """What becomes of the streams of a replica that ends, `delay` seconds later: they go on at their next
    token, whose KV is computed again but for what is cached there; or, where streams do not move, they are
    asked for again from the beginning."""

    move: bool = True
    delay: float = 0.1
    moved: int = 0
    restarted: int = 0
    lost_tokens: int = 0
    recomputed: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))

    def leaves(self, clock: RequestClock) -> None:
        """Its replica has ended."""
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
        """It was answered after all."""
        if clock.moves:
            self.recomputed += recomputed
            self.gaps.append(clock.gap)

    def figures(self) -> dict[str, Any]:
        """longest_gap_ms: of the streams whose replica ended."""
        return {
            "streams_moved": self.moved,
            "streams_restarted": self.restarted,
            "tokens_lost": self.lost_tokens,
            "tokens_recomputed": self.recomputed,
            "longest_gap_ms": summary.spread([1e3 * gap for gap in self.gaps]),
        }


@dataclass(frozen=True, slots=True)
class KeptReplica:
    """What is left of a replica that has no scheduler now. keys: of its cached KV, the next to be overwritten
    first; epoch: of its newest event."""

    keys: tuple[bytes, ...]
    epoch: int

    def wake(self, scheduler: Scheduler) -> None:
        """Give a new scheduler the KV that it had."""
        for key in self.keys:
            bring_up(scheduler.pool.full, key)


def asleep(scheduler: Scheduler, epoch: int) -> KeptReplica | None:
    """What to keep of an idle replica. None where it holds more than cached blocks: pins, a window."""
    pool = scheduler.pool
    if pool.window or scheduler.has_work or scheduler.load[2]:
        return None
    keys = [pool.full.keys[block] for block in pool.full.cached]
    return KeptReplica(tuple(key for key in keys if key is not None), epoch)


def count(sums: Counter[str], scheduler: Scheduler) -> None:
    """Add what a scheduler counted."""
    stats = scheduler.stats()
    for name in COUNTERS:
        sums[name] += int(stats[name])
