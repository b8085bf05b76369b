"""Queue orders: who of the waiting is asked first. Orthogonal to the batching policy.

An order is a key and a notice of what was served. It must not touch sequences, blocks or queues, and it never
decides who is preempted: that is rank, which does not move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pageturner.core.types import Sequence


class Order(Protocol):
    """Smallest key first."""

    def key(self, seq: Sequence, now: float) -> tuple[float, ...]:
        """Where the waiting sequence stands at `now`."""

    def served(self, seq: Sequence, n: int) -> None:
        """`n` tokens were computed for the sequence."""


class FCFS:
    """First come, first served: by arrival, then by id. A preempted sequence keeps its place in front.

    Nothing can overtake a waiting request, so it needs no ageing.
    """

    def key(self, seq: Sequence, now: float) -> tuple[float, ...]:
        return (seq.request.arrival, seq.request.id)

    def served(self, seq: Sequence, n: int) -> None:
        return None


ORDERS: dict[str, Callable[[], Order]] = {"fcfs": FCFS}
