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


class Priority:
    """The smallest priority first, then first come, first served.

    Ageing: once a request has waited for `ageing` seconds since it arrived, only requests that arrived before
    it stand in front of it, and they have aged too. So nothing can overtake it any more.
    """

    def __init__(self, ageing: float) -> None:
        if not ageing >= 0:
            raise ValueError(f"ageing takes at least 0 seconds, not {ageing}")
        self._ageing = ageing

    def key(self, seq: Sequence, now: float) -> tuple[float, ...]:
        request = seq.request
        if now >= request.arrival + self._ageing:
            return (0, request.arrival, request.id)
        return (1, request.priority, request.arrival, request.id)

    def served(self, seq: Sequence, n: int) -> None:
        return None


# name -> the order, given the seconds of ageing
ORDERS: dict[str, Callable[[float], Order]] = {"fcfs": lambda _: FCFS(), "priority": Priority}
