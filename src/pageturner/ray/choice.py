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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pageturner.router.placement import PLACEMENTS, Place, PrefixMap
from pageturner.router.prefix_digest import CHUNK

BYTES_PER_TOKEN = 4
FIRST_GUESS = 128  # tokens of an answer, before any was seen
LATELY = 0.1  # how much one more answer changes what is expected of the next


@dataclass(frozen=True, slots=True)
class Ask:
    """One request on its way to a replica.

    number   of this attempt, among all of its process
    prefix   digests of the chunks of its prompt
    most     tokens that its answer may have; 0: nothing is said
    avoid    replicas that should not get it again
    """

    number: int
    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prefix: tuple[bytes, ...] = ()
    most: int = 0
    avoid: tuple[str, ...] = ()


@dataclass(slots=True)
class AttemptUnderway:
    """A request that was given to a replica. tokens: that it is expected to cost; over: it has ended."""

    replica: str
    tokens: int
    over: bool = False


@dataclass(slots=True)
class Expected:
    """What is known of one replica. number: its name among beginnings of prompts; tokens: that it has to
    compute for us; others: open requests that it says it has for somebody else; said: how often."""

    number: int
    tokens: int = 0
    open: int = 0
    others: int = 0
    said: int = 0


@dataclass(slots=True)
class Choice:
    """The replicas of one deployment. Asked from two threads: Serve's router and the requests."""

    replicas: dict[str, Expected] = field(default_factory=dict)
    attempts: dict[int, AttemptUnderway] = field(default_factory=dict)
    answer_tokens: float = FIRST_GUESS
    placed: dict[str, int] = field(default_factory=lambda: {"where_known": 0, "elsewhere": 0})
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

    def told(self, id: str, said: int, active: int) -> None:
        """A replica says for the `said`th time how many requests it has, ours too."""
        with self._lock:
            if (one := self.replicas.get(id)) is not None and said != one.said:
                one.said, one.others = said, max(active - one.open, 0)

    def order(self, ask: Ask, ids: Sequence[str]) -> list[str]:
        """All of `ids`, the best first; those to avoid last."""
        with self._lock:
            known = [id for id in ids if id in self.replicas]
            fresh = [id for id in known if id not in ask.avoid] or known
            if not fresh:
                return list(ids)
            best = self._best(ask, fresh)
            rest = sorted((id for id in ids if id != best), key=lambda id: (id in ask.avoid, self._load(id)))
            return [best, *rest]

    def _best(self, ask: Ask, ids: list[str]) -> str:
        hints = self._hints(ask)
        numbers = [self.replicas[id].number for id in ids]
        near = {i: hints[number] for i, number in enumerate(numbers) if number in hints}
        usual = self._usual()
        loads = [round(self._load(id) / usual) for id in ids]
        return ids[self._place(loads, near, len(ask.prefix))]

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
            self.attempts[ask.number] = AttemptUnderway(id, prompt + answer)
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


_choices: dict[str, Choice] = {}
_making = threading.Lock()


def choice_of(deployment: str) -> Choice:
    """What this process knows of a deployment."""
    with _making:
        return _choices.setdefault(deployment, Choice())
