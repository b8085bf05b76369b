"""The replicas behind a router: which of them are there, how busy they are, and which one gets a
request.

Owns their health. Choosing among them is load_balancer.py, the same as in the simulator; who is put
aside for its failures is breaker.py; where addresses come from is members.py. Must not know what is
done with an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from statistics import median

import msgspec

from pageturner.config.settings import RouterConfig
from pageturner.errors import ClientError
from pageturner.http import http_client
from pageturner.http.decoding import decoded
from pageturner.http.http_client import AnswerPieces, ConnectionLost, ServerAddress
from pageturner.router.breaker import Breaker
from pageturner.router.forwarding import told_error
from pageturner.router.load_balancer import PLACEMENTS, LoadBalancer, PrefixMap
from pageturner.router.replica import Member, Replica, ReplicaRequest
from pageturner.router.request_hints import CHUNK_TOKENS, RequestHints

log = logging.getLogger("pageturner")

MAX_PAGE = 64 * 1024  # bytes of /health or /load
MAX_TROUBLE = 200  # characters that are told of it
PREFILL = "prefill"  # the role of a replica that computes prompts for others
SILENCES = (
    2  # health checks without any answer until a replica counts as gone; a refusal counts at once
)
MAX_STRAYS = 10_000  # answers that moved, whose new keepers are remembered
MAX_TOLD = 20  # names of models in an error
OUTLIER_SECONDS = 0.2  # by which an outlier's first bytes come later, whatever their ratio


class _Load(msgspec.Struct):
    server_load: int
    role: str = "both"
    predicted_tokens: float | None = None
    answer_tokens: float = 0.0


class Fleet:
    """All replicas. `watch` keeps their state true."""

    def __init__(
        self,
        members: Sequence[Member | ServerAddress],
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas: list[Replica] = []
        self.ejected = 0  # replicas put aside for their latency
        # by id of a request: who keeps its answer
        self.strays: OrderedDict[tuple[bytes, str], Replica] = OrderedDict()
        self._config = config
        self._clock = clock
        self._count = 0
        self._changed = asyncio.Event()
        self._begun = False
        self.balancer = balancer_of(
            config.placement, config.prefix_chunks, by_tokens=config.loads == "tokens"
        )
        self.set_members([one if isinstance(one, Member) else Member(one) for one in members])

    # -- who is there ------------------------------------------------------------------------------
    def set_members(self, members: Sequence[Member]) -> None:
        """Replace the replicas. A replica that is removed gets no new requests, but finishes those
        it has."""
        there = {replica.address: replica for replica in self.replicas}
        wanted = {member.address: member for member in members}
        for address in there.keys() - wanted.keys():
            self.balancer.forget(there[address].number)
            log.info("replica %s is taken out", address)
        replicas = []
        for address, member in wanted.items():
            replica = there.get(address)
            if replica is None:
                replica = Replica(number=self._count, address=address, breaker=Breaker(self._clock))
                self._count += 1
                if self._begun:
                    log.info("replica %s is taken in", address)
            replica.models = member.models
            replicas.append(replica)
        self.replicas = replicas
        self._changed.set()

    @property
    def models(self) -> list[str]:
        """The names of models for which replicas are set apart."""
        return list(dict.fromkeys(name for one in self.replicas for name in one.models))

    def answering(self, model: str) -> list[Replica]:
        """The replicas that answer for a model: those that are set apart for it, else those for
        anything. A request that names none may go to any, where all have the same."""
        named = [one for one in self.replicas if model in one.models]
        found = named or [one for one in self.replicas if not one.models]
        alike = not model and len({one.models for one in self.replicas}) == 1
        return self.replicas if alike else found

    def check_model(self, model: str) -> None:
        """Raise ClientError 404 if no replica serves this model, and 400 if several models are
        served and the request names none."""
        if not self.replicas or self.answering(model):
            return
        here = self.models
        told = ", ".join(map(repr, here[:MAX_TOLD])) + (
            " and others" if len(here) > MAX_TOLD else ""
        )
        if model:
            message = (
                f"the model {model[:128]!r} does not exist here: behind this router are {told}"
            )
            raise ClientError(404, "model_not_found", message, "model")
        raise ClientError(
            400, "missing_field", f"say which model: behind this router are {told}", "model"
        )

    def kept_elsewhere(self, id: str, owner: bytes, replica: Replica) -> None:
        """The answer to this owner's request of this id is kept there, and not where its name
        says."""
        self.strays[owner, id] = replica
        self.strays.move_to_end((owner, id))
        if len(self.strays) > MAX_STRAYS:
            self.strays.popitem(last=False)

    # -- choosing ----------------------------------------------------------------------------------
    def choose(self, asked: RequestHints, tried: Collection[Replica]) -> Replica | None:
        """Return the replica for a request; None if none is left. If all that are left are put
        aside, choose the least bad."""
        left = [
            one for one in self.answering(asked.model) if self.has_room(one) and one not in tried
        ]
        if not left:
            return None
        there = [one for one in left if one.breaker.admits()]
        there = there or [min(left, key=lambda one: one.breaker.badness())]
        loads = {one.number: self.load(one) for one in there}
        number = self.balancer.choose(asked.prefix, loads)
        return next(one for one in there if one.number == number)

    def load(self, replica: Replica) -> float:
        """Return what the replica has, or seems to have, in requests of the usual size. A replica
        that has just come seems busier than it is: its caches are cold, and a crowd would meet
        them."""
        load = self.balancer.load(replica) + replica.breaker.penalty
        weight = replica.weight(self._clock(), self._config.slow_start)
        return load if weight == 1.0 else (load + 1) / weight - 1

    def has_room(self, replica: Replica) -> bool:
        """Return whether the replica is available and may get another request."""
        return (
            replica.healthy
            and replica.role != PREFILL
            and replica.open < self._config.max_open_per_replica
        )

    def full(self, model: str) -> bool:
        """Return whether each replica that is there for this model has as many requests as it may
        have."""
        there = [one for one in self.answering(model) if one.healthy and one.role != PREFILL]
        return bool(there) and not any(map(self.has_room, there))

    @contextlib.asynccontextmanager
    async def exchange_with(
        self, replica: Replica, request: ReplicaRequest
    ) -> AsyncIterator[AnswerPieces]:
        """An exchange with a replica, whose answer has begun. Raises ConnectionLost; then the
        replica is asked at once how it is."""
        config = self._config
        raw = http_client.request_bytes(
            replica.address, request.method, request.target, request.headers, request.body
        )
        share = self.balancer.began(replica, request.hints)
        del request  # streams may last long, and bodies be large
        try:
            async with http_client.connect(
                replica.address, config.connect_timeout, config.read_timeout
            ) as exchange:
                replica.waiting.add(exchange)
                try:
                    await exchange.send(raw)
                    del raw
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
            self.balancer.ended(replica, share)

    # -- health ------------------------------------------------------------------------------------
    async def check_health(self) -> None:
        """Ask every replica once how it is."""
        await asyncio.gather(*map(self._check, self.replicas))
        self._begun = True

    async def watch(self) -> None:
        """Check for ever: each replica once in an interval, and at once when there is doubt about
        it."""
        watching: dict[Replica, asyncio.Task[None]] = {}
        self._begun = True
        try:
            while True:
                self._changed.clear()
                for gone in watching.keys() - set(self.replicas):
                    watching.pop(gone).cancel()
                for new in set(self.replicas) - watching.keys():
                    watching[new] = asyncio.create_task(self._watch(new))
                changed = asyncio.create_task(self._changed.wait())
                done, _ = await asyncio.wait(
                    {changed, *watching.values()}, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                for one in done - {changed}:
                    one.result()  # it only ends by an error of ours
        finally:
            for one in watching.values():
                one.cancel()

    async def _watch(self, replica: Replica) -> None:
        if not replica.healthy:
            await self._check(replica)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval):
                    await replica.check_now.wait()
            replica.check_now.clear()
            await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        breaker = replica.breaker
        self._eject_slow(replica)
        if replica.said_aside != breaker.times_aside:
            replica.said_aside = breaker.times_aside
            log.warning("replica %s fails: put aside for %g s", replica.address, breaker.patience)
        patience = self._config.health_timeout
        try:
            status, body = await http_client.get(replica.address, "/health", patience, MAX_PAGE)
            if status == 200:
                await self._ask_load(replica)
        except ConnectionLost as lost:
            replica.trouble = ""
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
        replica.trouble = trouble_in(status, body)
        if status == 200:
            if not replica.healthy:
                replica.healthy = True
                replica.came = self._clock() if self._begun else None
                log.info("replica %s is up", replica.address)
        else:
            # not there for new requests; those it has may still be answered: it drains, or its
            # engine is restarted under its open streams
            self._mark_down(replica, f"its /health says {status}")

    def _eject_slow(self, replica: Replica) -> None:
        """Put a replica aside if its time to first byte is much higher than that of the others."""
        factor, own = self._config.outlier_latency, replica.typical_first_byte()
        if not factor or own is None or replica.breaker.aside:
            return
        mates = [
            one for one in self.replicas if one.models == replica.models and one is not replica
        ]
        times = [one.typical_first_byte() for one in mates if one.healthy and not one.breaker.aside]
        known = [seconds for seconds in times if seconds is not None]
        if not known:
            return
        usual = median(known)
        if own > factor * usual and own > usual + OUTLIER_SECONDS:
            replica.breaker.eject()
            replica.first_bytes.clear()
            self.ejected += 1
            log.warning(
                "replica %s: streams begin after %.3g s, elsewhere after %.3g s",
                replica.address,
                own,
                usual,
            )

    def _mark_down(self, replica: Replica, why: str) -> None:
        if replica.healthy:
            replica.healthy = False
            replica.first_bytes.clear()
            log.warning("replica %s is down: %s", replica.address, why)
            self.balancer.forget(replica.number)

    async def _ask_load(self, replica: Replica) -> None:
        """Ask a replica for its load: its predicted tokens, and the number of requests that other
        clients have open there (0 if it does not report them)."""
        before = replica.open
        patience = self._config.health_timeout
        replica.tokens.ask()
        status, body = await http_client.get(replica.address, "/load", patience, MAX_PAGE)
        found = decoded(body, _Load) if status == 200 else None
        load = found or _Load(0, replica.role)
        replica.role = load.role
        replica.others = max(load.server_load - max(before, replica.open), 0)
        tokens = load.predicted_tokens
        replica.reports = tokens is not None and 0 <= tokens < float("inf")
        if tokens is not None and replica.reports:
            replica.tokens.report(tokens, load.server_load, max(0.0, load.answer_tokens))


def balancer_of(placement: str, prefix_chunks: int, *, by_tokens: bool) -> LoadBalancer:
    """Return a load balancer for prompts that are known by digests. KeyError for an unknown
    placement."""
    prefixes = PrefixMap(1, prefix_chunks) if placement == "prefix_aware" else None
    rule = PLACEMENTS[placement]()
    return LoadBalancer(rule, prefixes, by_tokens=by_tokens, chunk_tokens=CHUNK_TOKENS)


def trouble_in(status: int, body: bytes) -> str:
    """Return what a /health that is not 200 says, such as how much of a model is fetched."""
    if status == 200:
        return ""
    return told_error(body).message[:MAX_TROUBLE] or f"its /health says {status}"
