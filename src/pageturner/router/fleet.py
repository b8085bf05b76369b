"""The replicas behind a router: which of them are there, how busy they are, and which one gets a request.

Owns their health and their loads. The rules of choosing are placement.py, the same as in the simulator; who
is put aside for its failures is breaker.py. Must not know what a request says, nor what is done with
an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from pageturner import http_client
from pageturner.config import RouterConfig
from pageturner.http_client import AnswerPieces, ConnectionLost, Exchange, Headers, ServerAddress
from pageturner.router.breaker import Breaker
from pageturner.router.placement import PLACEMENTS, PrefixMap

log = logging.getLogger("pageturner")

MOST_PAGE = 64 * 1024  # bytes of /health or /load
PREFILL = "prefill"  # the role of a replica that computes prompts for others
SILENCES = 2  # health checks without any answer until a replica counts as gone; a refusal counts at once


class _Load(msgspec.Struct):
    server_load: int
    role: str = "both"


@dataclass(slots=True, eq=False)
class Replica:
    """One server. Requests of ours that it has: `open`; of others, when it was last asked: `others`.

    waiting  exchanges that it has not begun to answer
    check_now  set: there is doubt about it, ask it now
    """

    address: ServerAddress
    breaker: Breaker
    healthy: bool = False
    open: int = 0
    others: int = 0
    silences: int = 0
    waiting: set[Exchange] = field(default_factory=set)
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    answers: Counter[str] = field(default_factory=Counter)  # by status
    losses: Counter[str] = field(default_factory=Counter)  # by code of ConnectionLost
    role: str = "both"  # "prefill": it computes prompts for other engines, and gets no requests
    said_aside: int = 0  # of the times that it was put aside, those that are in the log

    @property
    def load(self) -> int:
        """Requests that it has, or seems to have."""
        return self.open + self.others + self.breaker.penalty


class Fleet:
    """All replicas. `watch` keeps their state true."""

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas = [Replica(address, Breaker(clock)) for address in addresses]
        self.placed = Counter({"nothing_known": 0, "where_known": 0, "elsewhere": 0})
        self._config = config
        self._place = PLACEMENTS[config.placement]()
        known = PrefixMap(1, config.prefix_chunks) if config.placement == "prefix_aware" else None
        self._prefixes = known

    # -- choosing --------------------------------------------------------------------------------------------
    def choose(self, prefix: tuple[bytes, ...], tried: Collection[Replica]) -> Replica | None:
        """Where a prompt with this prefix (digests of its chunks) goes; None when nobody is left. Where all
        that are left are put aside, the least bad one is better than no answer."""
        left = [n for n, one in enumerate(self.replicas) if self.has_room(one) and one not in tried]
        if not left:
            return None
        there = [n for n in left if self.replicas[n].breaker.admits()]
        there = there or [min(left, key=lambda n: self.replicas[n].breaker.badness())]
        known = self._prefixes.hints(prefix) if self._prefixes else {}
        hints = {i: known[n] for i, n in enumerate(there) if n in known}
        i = self._place([self.replicas[n].load for n in there], hints, len(prefix))
        if self._prefixes and prefix:
            self._prefixes.sent(prefix, there[i])
            self.placed["nothing_known" if not hints else "where_known" if i in hints else "elsewhere"] += 1
        return self.replicas[there[i]]

    def has_room(self, replica: Replica) -> bool:
        """It is there, and may have one more request."""
        return (
            replica.healthy and replica.role != PREFILL and replica.open < self._config.max_open_per_replica
        )

    @property
    def full(self) -> bool:
        """Whoever is there has as many requests as it may have."""
        there = [one for one in self.replicas if one.healthy and one.role != PREFILL]
        return bool(there) and not any(map(self.has_room, there))

    @contextlib.asynccontextmanager
    async def exchange_with(
        self, replica: Replica, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncIterator[AnswerPieces]:
        """An exchange with a replica, whose answer has begun. Raises ConnectionLost; then the replica is
        asked at once how it is."""
        config = self._config
        request = http_client.request_bytes(replica.address, method, target, headers, body)
        del body
        replica.open += 1
        try:
            async with http_client.connect(
                replica.address, config.connect_timeout, config.read_timeout
            ) as exchange:
                replica.waiting.add(exchange)
                try:
                    await exchange.send(request)
                    del request  # streams may last long, and bodies be large
                finally:
                    replica.waiting.discard(exchange)
                replica.answers[str(exchange.status)] += 1
                yield exchange
        except ConnectionLost as lost:
            replica.losses[lost.code] += 1
            if lost.code != "local":
                replica.check_now.set()
            log.warning("replica %s: %s", replica.address, lost)
            raise
        finally:
            replica.open -= 1

    # -- health ----------------------------------------------------------------------------------------------
    async def check_health(self) -> None:
        """Ask every replica once how it is."""
        await asyncio.gather(*map(self._check, self.replicas))

    async def watch(self) -> None:
        """For ever: each replica once in an interval, and at once when there is doubt about it."""
        await asyncio.gather(*map(self._watch, self.replicas))

    async def _watch(self, replica: Replica) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval):
                    await replica.check_now.wait()
            replica.check_now.clear()
            await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        breaker = replica.breaker
        if replica.said_aside != breaker.times_aside:
            replica.said_aside = breaker.times_aside
            log.warning("replica %s fails: put aside for %g s", replica.address, breaker.patience)
        patience = self._config.health_timeout
        try:
            status, _ = await http_client.get(replica.address, "/health", patience, MOST_PAGE)
            if status == 200:
                replica.others = await self._others(replica)
        except ConnectionLost as lost:
            if lost.code == "local":
                log.warning("replica %s cannot be asked: %s", replica.address, lost)
                return
            replica.silences += 1
            if lost.code == "connect" or replica.silences >= SILENCES:
                self._mark_down(replica, str(lost))
                for exchange in list(replica.waiting):
                    exchange.abort()  # nothing came yet: another replica answers
            return
        replica.silences = 0
        if status == 200:
            if not replica.healthy:
                replica.healthy = True
                log.info("replica %s is up", replica.address)
        else:
            # not there for new requests; those it has may still be answered: it drains, or its engine is
            # restarted under its open streams
            self._mark_down(replica, f"its /health says {status}")

    def _mark_down(self, replica: Replica, why: str) -> None:
        if replica.healthy:
            replica.healthy = False
            log.warning("replica %s is down: %s", replica.address, why)
            if self._prefixes:
                self._prefixes.gone(self.replicas.index(replica))

    async def _others(self, replica: Replica) -> int:
        """Answers under way at a replica that other programs asked for. 0 where it does not tell."""
        before = replica.open
        patience = self._config.health_timeout
        status, body = await http_client.get(replica.address, "/load", patience, MOST_PAGE)
        try:
            load = msgspec.json.decode(body, type=_Load) if status == 200 else _Load(0, replica.role)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            load = _Load(0, replica.role)
        replica.role = load.role
        return max(load.server_load - max(before, replica.open), 0)
