"""One server behind a router: where it is, which models it answers for, and how it is.

Owns its state as data. Must not know how it is asked (fleet.py), nor where its address comes from
(members.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median

from pageturner.http.http_client import Exchange, Headers, ServerAddress
from pageturner.router.breaker import Breaker
from pageturner.router.load_balancer import ReplicaLoad
from pageturner.router.request_hints import NO_HINTS, RequestHints

LEAST_WEIGHT = 0.1  # of one that has just come
FIRST_BYTES = 20  # times to first bytes that are remembered


@dataclass(frozen=True, slots=True)
class Member:
    """The entry of a source for one replica. models: that it answers for, and no others; ():
    whatever it is asked for."""

    address: ServerAddress
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request as a replica gets it. hints: how much work it may be."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""
    hints: RequestHints = NO_HINTS


@dataclass(slots=True, eq=False, kw_only=True)
class Replica(ReplicaLoad):
    """One server.

    waiting  exchanges that it has not begun to answer
    check_now  set: there is doubt about it, ask it now
    avoid, where  under Ray Serve, which chooses itself: replicas that should not get the request
                  again, and which one it was given to, "" before that is known
    trouble  why its /health says that it takes no requests; "" where it does, or does not answer
    came     when it came or came back, where that was while others worked; None: it was there from
             the start
    """

    address: ServerAddress
    breaker: Breaker
    models: tuple[str, ...] = ()
    healthy: bool = False
    trouble: str = ""
    silences: int = 0
    came: float | None = None
    waiting: set[Exchange] = field(default_factory=set)
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    answers: Counter[str] = field(default_factory=Counter)  # by status
    losses: Counter[str] = field(default_factory=Counter)  # by code of ConnectionLost
    role: str = "both"  # "prefill": it computes prompts for other engines, and gets no requests
    said_aside: int = 0  # of the times that it was put aside, those that are in the log
    # of streams, s
    first_bytes: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST_BYTES))

    avoid: tuple[str, ...] = ()
    where: str = ""

    def weight(self, now: float, slow_start: float) -> float:
        """1, or less for one that came less than `slow_start` seconds ago."""
        if self.came is None or now >= self.came + slow_start:
            return 1.0
        return max(LEAST_WEIGHT, (now - self.came) / slow_start)

    def typical_first_byte(self) -> float | None:
        """Seconds; None where too few streams were seen."""
        return median(self.first_bytes) if len(self.first_bytes) == FIRST_BYTES else None
