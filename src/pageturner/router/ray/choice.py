"""Which replica of a Serve deployment gets a request, by our own rules of placement.

Owns what one process knows of a deployment's replicas: the tokens that it expects each to compute yet, and
which beginnings of prompts it sent where. The rules are router/placement.py. Must not know Ray: the request
router (request_router.py) tells who is there, and asks.

Loads are predicted tokens: those of the prompt that are probably not cached, and as many as answers of this
deployment lately had, at most what the request allows. Placement compares requests, so they are counted in
requests of the usual size.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pageturner.router.placement import PLACEMENTS, Place, PrefixMap
from pageturner.router.prefix_digest import CHUNK
from pageturner.router.ray.adapters import AdapterChange, AdapterTable, Told

BYTES_PER_TOKEN = 4
FIRST_GUESS = 128  # tokens of an answer, before any was seen
WORTH = 4  # requests more that a replica may have for the sake of an adapter that it holds
LATELY = 0.1  # how much one more answer changes what is expected of the next


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


@dataclass(slots=True)
class AttemptUnderway:
    """A request that was given to a replica. tokens: that it is expected to cost; over: it has ended;
    adapter: the name of the one that it has."""

    replica: str
    tokens: int
    adapter: str = ""
    over: bool = False


@dataclass(slots=True)
class Expected:
    """What is known of one replica. number: its name among beginnings of prompts; tokens: that it has to
    compute for us; others: open requests that it says it has for somebody else; said: how often; adapters:
    that it says are in its memory; wanted: those that our open requests there have."""

    number: int
    tokens: int = 0
    open: int = 0
    others: int = 0
    said: int = 0
    adapters: frozenset[str] = frozenset()
    wanted: Counter[str] = field(default_factory=Counter)

    def holds(self, adapter: str) -> bool:
        """Whether a request for this adapter finds it in memory, or being read."""
        return adapter in self.adapters or self.wanted[adapter] > 0


@dataclass(slots=True)
class Choice:
    """The replicas of one deployment. Asked from two threads: Serve's router and the requests."""

    replicas: dict[str, Expected] = field(default_factory=dict)
    attempts: dict[int, AttemptUnderway] = field(default_factory=dict)
    answer_tokens: float = FIRST_GUESS
    adapters: AdapterTable = field(default_factory=AdapterTable)
    placed: dict[str, int] = field(default_factory=lambda: {"where_known": 0, "elsewhere": 0})
    multiplexed: dict[str, int] = field(default_factory=lambda: {"in_memory": 0, "to_load": 0})
    _place: Place = field(default_factory=PLACEMENTS["prefix_aware"])
    _prefixes: PrefixMap | None = field(default_factory=lambda: PrefixMap(1))
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set_up(self, placement: str, prefix_chunks: int) -> None:
        """Begin with these rules. KeyError for a placement that is not there."""
        with self._lock:
            self._place = PLACEMENTS[placement]()
            self._prefixes = PrefixMap(1, prefix_chunks) if placement == "prefix_aware" else None

    def update(self, ids: Collection[str]) -> None:
        """These are the replicas now."""
        with self._lock:
            for gone in set(self.replicas) - set(ids):
                number = self.replicas.pop(gone).number
                if self._prefixes is not None:
                    self._prefixes.gone(number)
            for id in ids:
                if id not in self.replicas:
                    self.replicas[id] = Expected(self._count)
                    self._count += 1

    def told(
        self,
        id: str,
        said: int,
        active: int,
        adapters: Collection[str] = (),
        changes: Told | None = None,
    ) -> None:
        """A replica says for the `said`th time how many requests it has, ours too, which adapters it holds in
        memory, and which changes of adapters it knows."""
        with self._lock:
            if (one := self.replicas.get(id)) is not None and said != one.said:
                one.said, one.others = said, max(active - one.open, 0)
                one.adapters = frozenset(adapters)
                self.adapters.merge(changes or {})

    def given(self, adapters: Mapping[str, str]) -> None:
        """These adapters stand in the settings of the application: name -> folder."""
        with self._lock:
            known, self.adapters = self.adapters, AdapterTable(adapters)
            self.adapters.merge(known.told())

    def adapter(self, name: str | None) -> AdapterChange | None:
        """The adapter that a request names as its model."""
        with self._lock:
            return self.adapters.find(name)

    def full(self, name: str) -> bool:
        """Whether no adapter of this name may be loaded, because so many were."""
        with self._lock:
            return self.adapters.full and self.adapters.find(name) is None

    def unloaded(self, name: str) -> bool:
        """Whether an adapter of this name was there, and is no more."""
        with self._lock:
            return self.adapters.unloaded(name)

    def loaded(self) -> list[AdapterChange]:
        """The adapters that were loaded while the application runs."""
        with self._lock:
            return self.adapters.loaded()

    def next_change(self, name: str, path: str) -> AdapterChange:
        """A change that holds against what is known of this adapter. path: "" to unload it."""
        with self._lock:
            return self.adapters.next(name, path)

    def change(self, change: AdapterChange) -> None:
        """An adapter was loaded or unloaded at all replicas."""
        with self._lock:
            self.adapters.note(change)

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
        hints = self._hints(ask)
        if ask.adapter is not None:
            ids = self._with_adapter(ask.adapter.name, ids, hints)
        numbers = [self.replicas[id].number for id in ids]
        near = {i: hints[number] for i, number in enumerate(numbers) if number in hints}
        usual = self._usual()
        loads = [round(self._load(id) / usual) for id in ids]
        return ids[self._place(loads, near, len(ask.prefix))]

    def _with_adapter(self, name: str, ids: list[str], hints: Mapping[int, int]) -> list[str]:
        """Of these, those that hold the adapter, unless each has so much to do that reading it elsewhere
        costs less. Where nobody holds it and no beginning is known: of the least loaded, those that hold the
        fewest."""
        usual = self._usual()
        loads = {id: round(self._load(id) / usual) for id in ids}
        least = min(loads.values())
        holders = [id for id in ids if self.replicas[id].holds(name) and loads[id] <= least + WORTH]
        if holders or hints:
            return holders or ids
        idle = [id for id in ids if loads[id] == least]
        held = {
            id: len(self.replicas[id].adapters | self.replicas[id].wanted.keys()) for id in idle
        }
        return [id for id in idle if held[id] == min(held.values())]

    def _hints(self, ask: Ask) -> dict[int, int]:
        return self._prefixes.hints(ask.prefix) if self._prefixes is not None and ask.prefix else {}

    def _load(self, id: str) -> float:
        one = self.replicas.get(id)
        return 0.0 if one is None else one.tokens + one.others * self._usual()

    def _usual(self) -> float:
        """Tokens of a request of the usual size."""
        begun = [one.tokens for one in self.attempts.values() if not one.over]
        return max(1.0, sum(begun) / len(begun) if begun else self.answer_tokens)

    def began(self, ask: Ask, id: str) -> None:
        """The request is at this replica, and at no other one."""
        with self._lock:
            self._end(ask.number)
            one = self.replicas.get(id)
            if one is None:
                return
            cached = self._hints(ask).get(one.number, 0)
            if ask.prefix:
                self.placed["where_known" if cached else "elsewhere"] += 1
            prompt = (len(ask.prefix) - cached) * CHUNK // BYTES_PER_TOKEN
            answer = round(min(self.answer_tokens, ask.most or self.answer_tokens))
            adapter = "" if ask.adapter is None else ask.adapter.name
            if adapter:
                self.multiplexed["in_memory" if one.holds(adapter) else "to_load"] += 1
                one.wanted[adapter] += 1
            self.attempts[ask.number] = AttemptUnderway(id, prompt + answer, adapter)
            one.tokens += prompt + answer
            one.open += 1
            if self._prefixes is not None and ask.prefix:
                self._prefixes.sent(ask.prefix, one.number)

    def where(self, number: int) -> str:
        """The replica to which this attempt was last given; "" before that."""
        attempt = self.attempts.get(number)
        return "" if attempt is None else attempt.replica

    def ended(self, number: int) -> None:
        """The attempt is at its replica no more."""
        with self._lock:
            self._end(number)

    def forget(self, number: int, tokens: int = 0) -> None:
        """Nobody asks for this attempt again. tokens: of its whole answer, where that was seen to end."""
        with self._lock:
            self._end(number)
            self.attempts.pop(number, None)
            if tokens:
                self.answer_tokens += LATELY * (tokens - self.answer_tokens)

    def _end(self, number: int) -> None:
        attempt = self.attempts.get(number)
        if attempt is None or attempt.over:
            return
        attempt.over = True
        if (one := self.replicas.get(attempt.replica)) is not None:
            one.tokens = max(0, one.tokens - attempt.tokens)
            one.open = max(0, one.open - 1)
            if attempt.adapter:
                one.wanted[attempt.adapter] -= 1
                one.wanted += Counter()  # without those that nobody has


_choices: dict[str, Choice] = {}
_making = threading.Lock()


def choice_of(deployment: str) -> Choice:
    """What this process knows of a deployment."""
    with _making:
        return _choices.setdefault(deployment, Choice())
