"""The load balancer: which of several replicas gets a request.

Owns the rules of placement, the load of each replica, and the memory of which prefixes were sent
where. The router, Ray Serve's request router and the simulator use the same. Must not know HTTP,
time, nor how replicas are reached.

Loads are open requests, or predicted tokens. A replica reports how many tokens it has yet to
compute; a report grows old within milliseconds where answers are short. So it is counted down: of
what a replica said it had for n requests, one n-th goes with each of them that ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pageturner.router.request_hints import RequestHints

# (load of each replica, in requests of the usual size,
# replica -> prompt tokens it likely has cached, prompt tokens) -> replica
Placement = Callable[[Sequence[float], Mapping[int, int], int], int]

FIRST_GUESS = 128.0  # tokens of an answer, before any replica has told what it expects
SMOOTHING = 0.05  # how much one more request changes what is expected of the next
Share = tuple[int, int]  # (round in which a request was given to a replica, its tokens)
WORTH = 4  # a prompt that is cached whole is worth so many open requests more; one that is half cached, half


class RoundRobin:
    """Round robin, whatever the load of the replicas."""

    def __init__(self) -> None:
        self._next = -1

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        self._next = (self._next + 1) % len(loads)
        return self._next


class LeastLoaded:
    """Fewest open requests. Ties are broken by round robin, so that an idle cluster is used
    evenly."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        least = min(loads)
        try:
            self._last = loads.index(least, self._last + 1)
        except ValueError:
            self._last = loads.index(least)
        return self._last


class PrefixAware:
    """The replica where most of the prompt is cached, as long as that is worth the requests that
    are open there beyond those of the least loaded: share of the prompt times WORTH. Else the least
    loaded."""

    def __init__(self) -> None:
        self._least = LeastLoaded()

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        if hints:
            gains = {
                replica: WORTH * tokens / length - loads[replica]
                for replica, tokens in hints.items()
            }
            best = max(gains, key=lambda replica: (gains[replica], -replica))
            if gains[best] > -min(loads):
                return best
        return self._least(loads, hints, length)


PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


class Content(Protocol):
    """The elements of prompts: token ids, or bytes of text; slices of it can be keys."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> object: ...


class PrefixMap:
    """Remembers which replicas were sent which prefixes, in chunks of `chunk` tokens; the `most`
    latest are kept.

    A chunk is named by the hash of its content and of the name of the one before it. Two that have
    one name cost a wrong guess, and no more: a hint is never needed to be right.
    """

    def __init__(self, chunk: int = 256, most: int = 200_000) -> None:
        if chunk < 1 or most < 1:
            raise ValueError(
                f"chunks have at least one token and one is kept, not {chunk} and {most}"
            )
        self._chunk = chunk
        self._most = most
        self._sent: OrderedDict[int, list[int]] = OrderedDict()

    def hints(self, prompt: Content) -> dict[int, int]:
        """Replica -> tokens at the beginning of the prompt that it was sent before."""
        found: dict[int, int] = {}
        for end, name in self._names(prompt):
            replicas = self._sent.get(name)
            if replicas is None:
                break
            for replica in replicas:
                if found.get(replica, 0) == end - self._chunk:
                    found[replica] = end
        return found

    def sent(self, prompt: Content, replica: int) -> None:
        """Remember that the prompt went to the replica."""
        for _, name in self._names(prompt):
            replicas = self._sent.setdefault(name, [])
            self._sent.move_to_end(name)
            if replica not in replicas:
                replicas.append(replica)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def gone(self, replica: int) -> None:
        """The replica has lost what it had: it was restarted or left."""
        for replicas in self._sent.values():
            if replica in replicas:
                replicas.remove(replica)

    def _names(self, prompt: Content) -> Iterator[tuple[int, int]]:
        """Yield where each whole chunk ends, and its name."""
        name = 0
        for end in range(self._chunk, len(prompt) + 1, self._chunk):
            name = hash((name, prompt[end - self._chunk : end]))
            yield end, name


@dataclass(slots=True)
class TokenLoad:
    """One replica. told, of: tokens that it has at its last report, for so many requests; answer:
    tokens of an answer as its predictor expects them, 0 where it does not say."""

    told: float = 0.0
    of: int = 0
    answer: float = 0.0
    _asking: int = 0  # of requests begun before a report that is under way
    _fresh: int = 0  # of those begun since
    _round: int = 0
    _reported: int = -1  # the last round whose requests a report includes

    @property
    def tokens(self) -> float:
        """The tokens that the replica has yet to compute."""
        return max(0.0, self.told + self._asking + self._fresh)

    def began(self, tokens: int) -> Share:
        """Count a request of this many tokens. Pass the result to `ended` once."""
        self._fresh += tokens
        return self._round, tokens

    def ended(self, share: Share) -> None:
        """Remove a request that has ended."""
        begun, tokens = share
        if begun == self._round:
            self._fresh -= tokens
        elif begun > self._reported:
            self._asking -= tokens
        elif self.of > 0:
            self.told -= self.told / self.of
            self.of -= 1
            self.told = self.told if self.of else 0.0

    def ask(self) -> None:
        """Note that a report is being requested: requests that begin from now on may be missing in
        it."""
        self._asking += self._fresh
        self._fresh = 0
        self._round += 1

    def report(self, tokens: float, requests: int, answer: float) -> None:
        """Note what the replica reported. answer: 0 where it does not say."""
        self.told, self.of = tokens, requests
        self.answer = answer or self.answer  # an idle one expects none
        self._asking, self._reported = 0, self._round - 1


@dataclass(slots=True)
class UsualRequest:
    """Placement compares requests: loads are counted in requests of the usual size. tokens: of
    one."""

    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        """Add a request of this many tokens to the average."""
        self.tokens = (
            tokens if not self.tokens else self.tokens + SMOOTHING * (tokens - self.tokens)
        )

    def requests(self, tokens: float) -> float:
        """So many tokens, in requests."""
        return tokens / self.tokens if self.tokens else 0.0


def expected_tokens(prompt: float, cached: float, answer: float, most: int) -> int:
    """Return what a request is expected to cost: of its prompt what is probably not cached, and an
    answer of the expected length, at most what it may have (`most`; 0: as many as it likes)."""
    answer = answer or FIRST_GUESS
    return round(max(0.0, prompt - cached) + (min(answer, most) if most else answer))


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """The load of one replica. open: requests that we gave it and that have not ended; others:
    those of other programs, as it last said; reports: it says itself how many tokens it has yet to
    compute."""

    number: int = 0
    open: int = 0
    others: int = 0
    tokens: TokenLoad = field(default_factory=TokenLoad)
    reports: bool = False


class LoadBalancer:
    """Chooses among replicas by their numbers, which are never given twice.

    prefixes      remembers what was sent where; None: the placement does not look at prefixes
    by_tokens     loads are predicted tokens; else they are open requests
    chunk_tokens  tokens that an element of a prefix stands for
    placed        prompts, by whether they went where their prefix is known
    """

    def __init__(
        self,
        placement: Placement,
        prefixes: PrefixMap | None = None,
        *,
        by_tokens: bool = False,
        chunk_tokens: int = 1,
    ) -> None:
        self.prefixes = prefixes
        self.by_tokens = by_tokens
        self.placed = Counter({"nothing_known": 0, "where_known": 0, "elsewhere": 0})
        self.answer_tokens = 0.0  # of an answer, as far as was seen here
        self._placement = placement
        self._chunk_tokens = chunk_tokens
        self._usual = UsualRequest()

    def cached(self, prefix: Content) -> dict[int, int]:
        """Return replica -> elements of the prefix that it was sent before."""
        if self.prefixes is None or not len(prefix):
            return {}
        return self.prefixes.hints(prefix)

    def load(self, replica: ReplicaLoad) -> float:
        """Return what it has to do, in requests of the usual size."""
        if not self.by_tokens:
            return float(replica.open + replica.others)
        own = self._usual.requests(replica.tokens.tokens)
        return own if replica.reports else own + replica.others

    def choose(self, prefix: Content, loads: Mapping[int, float]) -> int:
        """Return the number of the replica that gets a request. loads: of the replicas that may get
        it."""
        numbers = list(loads)
        known = self.cached(prefix)
        hints = {numbers.index(one): known[one] for one in known if one in loads}
        place = self._placement(list(loads.values()), hints, len(prefix))
        if self.prefixes is not None and len(prefix):
            self.placed[
                "where_known" if place in hints else "elsewhere" if hints else "nothing_known"
            ] += 1
        return numbers[place]

    def began(self, replica: ReplicaLoad, request: RequestHints) -> Share:
        """The replica is given this request. What is returned goes to `ended` once."""
        replica.open += 1
        return replica.tokens.began(self._expected(replica, request))

    def _expected(self, replica: ReplicaLoad, request: RequestHints) -> int:
        if not request.prompt:
            return 1  # a page
        cached = self.cached(request.prefix).get(replica.number, 0) * self._chunk_tokens
        if self.prefixes is not None:
            self.prefixes.sent(request.prefix, replica.number)
        answer = replica.tokens.answer or self.answer_tokens
        tokens = expected_tokens(request.prompt, cached, answer, request.max_tokens)
        self._usual.add(tokens)
        return tokens

    def ended(self, replica: ReplicaLoad, share: Share) -> None:
        """The replica has that request no more."""
        replica.open -= 1
        replica.tokens.ended(share)

    def saw_answer(self, tokens: int) -> None:
        """An answer with so many tokens has ended."""
        known = self.answer_tokens or FIRST_GUESS
        self.answer_tokens = known + SMOOTHING * (tokens - known)

    def forget(self, number: int) -> None:
        """This replica has lost its cache."""
        if self.prefixes is not None:
            self.prefixes.gone(number)
