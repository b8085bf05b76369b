"""The choice of the replica of a Serve deployment that gets a request, by our own rules of
placement.

Owns what one process knows of a deployment's replicas, and of their adapters. The rules are
router/load_balancer.py. Must not know Ray: the request router (request_router.py) tells who is
there, and asks.

Loads are predicted tokens: those of the prompt that are probably not cached, and as many as answers
of this deployment lately had, at most what the request allows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pageturner.router.fleet import balancer_of
from pageturner.router.load_balancer import LoadBalancer, ReplicaLoad, Share
from pageturner.router.ray.adapters import AdapterChange, AdapterTable, Told
from pageturner.router.request_hints import CHUNK_TOKENS, RequestHints

PREFIX_CHUNKS = 200_000  # before Serve has told the settings
WORTH = 4  # requests more that a replica may have for the sake of an adapter that it holds


@dataclass(frozen=True, slots=True)
class Ask:
    """One request on its way to a replica.

    number   of this attempt, among all of its process
    prefix   digests of the chunks of its prompt
    most     tokens that its answer may have; 0: nothing is said
    avoid    replicas that should not get it again
    adapter  that it names as its model, if it names one
    """

    number: int
    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prefix: tuple[bytes, ...] = ()
    most: int = 0
    avoid: tuple[str, ...] = ()
    adapter: AdapterChange | None = None


@dataclass(slots=True, eq=False)
class ServeReplica(ReplicaLoad):
    """The state of one replica.

    id        Serve's name of it
    said      how often it has reported
    adapters  that it says are in its memory
    wanted    those that our open requests there have
    """

    id: str = ""
    said: int = 0
    adapters: frozenset[str] = frozenset()
    wanted: Counter[str] = field(default_factory=Counter)

    def holds(self, adapter: str) -> bool:
        """Return whether a request for this adapter finds it in memory, or being read."""
        return adapter in self.adapters or self.wanted[adapter] > 0


@dataclass(slots=True)
class AttemptUnderway:
    """A request that was given to a replica. adapter: the name of the one that it has; over: it has
    ended."""

    replica: ServeReplica
    share: Share
    adapter: str = ""
    over: bool = False


@dataclass(slots=True)
class Choice:
    """The replicas of one deployment. RequestHints from two threads: Serve's router and the
    requests."""

    replicas: dict[str, ServeReplica] = field(default_factory=dict)
    attempts: dict[int, AttemptUnderway] = field(default_factory=dict)
    adapters: AdapterTable = field(default_factory=AdapterTable)
    placed: dict[str, int] = field(default_factory=lambda: {"where_known": 0, "elsewhere": 0})
    multiplexed: dict[str, int] = field(default_factory=lambda: {"in_memory": 0, "to_load": 0})
    balancer: LoadBalancer = field(
        default_factory=lambda: balancer_of("prefix_aware", PREFIX_CHUNKS, by_tokens=True)
    )
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set_up(self, placement: str, prefix_chunks: int) -> None:
        """Begin with these rules. KeyError for a placement that is not there."""
        with self._lock:
            self.balancer = balancer_of(placement, prefix_chunks, by_tokens=True)

    def update(self, ids: Collection[str]) -> None:
        """Set the current replicas."""
        with self._lock:
            for gone in set(self.replicas) - set(ids):
                self.balancer.forget(self.replicas.pop(gone).number)
            for id in ids:
                if id not in self.replicas:
                    self.replicas[id] = ServeReplica(self._count, id=id)
                    self._count += 1

    def told(
        self,
        id: str,
        said: int,
        active: int,
        adapters: Collection[str] = (),
        changes: Told | None = None,
    ) -> None:
        """A replica says for the `said`th time how many requests it has, ours too, which adapters
        it holds in memory, and which changes of adapters it knows."""
        with self._lock:
            if (one := self.replicas.get(id)) is not None and said != one.said:
                one.said, one.others = said, max(active - one.open, 0)
                one.adapters = frozenset(adapters)
                self.adapters.merge(changes or {})

    def given(self, adapters: Mapping[str, str]) -> None:
        """Set the adapters in the settings of the application: name -> folder."""
        with self._lock:
            known, self.adapters = self.adapters, AdapterTable(adapters)
            self.adapters.merge(known.told())

    def order(self, ask: Ask, ids: Sequence[str]) -> list[str]:
        """All of `ids`, the best first; those to avoid last."""
        with self._lock:
            known = [id for id in ids if id in self.replicas]
            fresh = [id for id in known if id not in ask.avoid] or known
            if not fresh:
                return list(ids)
            best = self._best(ask, fresh)
            rest = sorted(
                (id for id in ids if id != best), key=lambda id: (id in ask.avoid, self._load(id))
            )
            return [best, *rest]

    def _best(self, ask: Ask, ids: list[str]) -> str:
        if ask.adapter is not None:
            known = bool(self.balancer.cached(ask.prefix))
            ids = self._with_adapter(ask.adapter.name, ids, known)
        names = {self.replicas[id].number: id for id in ids}
        return names[
            self.balancer.choose(ask.prefix, {n: self._load(id) for n, id in names.items()})
        ]

    def _with_adapter(self, name: str, ids: list[str], prefix_known: bool) -> list[str]:
        """Return those of these replicas that hold the adapter, unless each has so much to do that
        reading the adapter elsewhere costs less. Where none holds it and the prefix is known
        nowhere, return those of the least loaded that hold the fewest adapters."""
        loads = {id: round(self._load(id)) for id in ids}
        least = min(loads.values())
        holders = [id for id in ids if self.replicas[id].holds(name) and loads[id] <= least + WORTH]
        if holders or prefix_known:
            return holders or ids
        idle = [self.replicas[id] for id in ids if loads[id] == least]
        fewest = min(len(one.adapters | one.wanted.keys()) for one in idle)
        return [one.id for one in idle if len(one.adapters | one.wanted.keys()) == fewest]

    def _load(self, id: str) -> float:
        one = self.replicas.get(id)
        return 0.0 if one is None else self.balancer.load(one)

    def began(self, ask: Ask, id: str) -> None:
        """Record that a request runs at this replica, and at no other."""
        with self._lock:
            self._end(ask.number)
            one = self.replicas.get(id)
            if one is None:
                return
            if ask.prefix:
                cached = one.number in self.balancer.cached(ask.prefix)
                self.placed["where_known" if cached else "elsewhere"] += 1
            adapter = "" if ask.adapter is None else ask.adapter.name
            if adapter:
                self.multiplexed["in_memory" if one.holds(adapter) else "to_load"] += 1
                one.wanted[adapter] += 1
            prompt = max(1, len(ask.prefix) * CHUNK_TOKENS)
            hints = RequestHints(ask.prefix, prompt=prompt, max_tokens=ask.most)
            self.attempts[ask.number] = AttemptUnderway(
                one, self.balancer.began(one, hints), adapter
            )

    def where(self, number: int) -> str:
        """The replica to which this attempt was last given; "" before that."""
        attempt = self.attempts.get(number)
        return "" if attempt is None else attempt.replica.id

    def ended(self, number: int) -> None:
        """The attempt is at its replica no more."""
        with self._lock:
            self._end(number)

    def forget(self, number: int, tokens: int = 0) -> None:
        """Forget an attempt that is over. tokens: of its whole answer, if that was seen to end."""
        with self._lock:
            self._end(number)
            self.attempts.pop(number, None)
            if tokens:
                self.balancer.saw_answer(tokens)

    def _end(self, number: int) -> None:
        attempt = self.attempts.get(number)
        if attempt is None or attempt.over:
            return
        attempt.over = True
        one = attempt.replica
        self.balancer.ended(one, attempt.share)
        if attempt.adapter:
            one.wanted[attempt.adapter] -= 1
            one.wanted += Counter()  # without those that nobody has


_choices: dict[str, Choice] = {}
_making = threading.Lock()


def choice_of(deployment: str) -> Choice:
    """Return what this process knows of a deployment."""
    with _making:
        return _choices.setdefault(deployment, Choice())
