"""Replicas behind a placement, simulated: who gets a request, and prompts that are computed
elsewhere.

Owns the loads of replicas, and how KV gets from one that computes prompts to one that answers. Must
not know time beyond the seconds that this takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from pageturner.kv.kv_transfer import sequence_of
from pageturner.kv.store_hooks import add_block_hooks, bring_up
from pageturner.lab.bench.prompt_alone import prefill_seconds
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.request import Request
from pageturner.router.load_balancer import (
    LoadBalancer,
    Placement,
    PrefixMap,
    ReplicaLoad,
    Share,
)
from pageturner.router.request_hints import RequestHints
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import Store

REPORT_SECONDS = 1.0  # as --health-interval of a router


@dataclass(frozen=True, slots=True)
class Roles:
    """The first `prefill` replicas compute prompts of which `least` tokens and more are new; the
    others answer, and compute the rest. The KV of a token takes `token_seconds` on a link, of which
    each pair of replicas has one, and goes chunk by chunk while the prompt is computed; `latency`:
    seconds once for a prompt."""

    prefill: int
    least: int = 0
    token_seconds: float = 0.0
    latency: float = 0.0

    def on_the_way(
        self, cost: StepCost, cached: int, length: int, budget: int, there: int = 0
    ) -> float:
        """Seconds from the end of a prompt's computation, of which so many tokens were cached, to
        its last KV at the other replica, which had the KV of `there` tokens before: that is not
        sent."""
        sent = max(length - there, 0)
        late = sent * self.token_seconds - prefill_seconds(
            cost, min(cached, length - 1), length, budget
        )
        return max(min(budget, sent) * self.token_seconds, late) + self.latency


NO_SHARE: Share = (0, 0)
AWAY = 1 << 40  # added to the load of a replica that takes no requests: no placement prefers it


@dataclass(slots=True)
class SimulatedFleet:
    """Replicas that one load balancer chooses among, by numbers from `first` on.

    loads  of each replica, as a router counts them
    away   places of those that take no requests
    """

    first: int
    loads: list[ReplicaLoad]
    balancer: LoadBalancer
    most_open: int = 0
    away: set[int] = field(default_factory=set)
    _next_report: float = 0.0
    _shares: dict[int, Share] = field(default_factory=dict)
    _known: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = {one.number: self.balancer.load(one) for one in self.loads}

    @property
    def takes_requests(self) -> bool:
        """Return whether any replica takes requests."""
        return len(self.away) < len(self.loads)

    def choose(self, request: Request) -> int:
        """Return the number of the replica that gets the request; one of them takes requests."""
        loads = self._current_loads()
        place = self.balancer.choose(request.prompt, loads)
        while place in self.away:  # of a placement that looks at no loads: the next one
            place = self.balancer.choose(request.prompt, loads)
        hints = RequestHints(
            request.prompt,
            prompt=len(request.prompt),
            max_tokens=request.params.max_tokens or 0,
        )
        share = self.balancer.began(self.loads[place], hints)
        if self.balancer.by_tokens:
            self._shares[request.id] = share
        self._note(place)
        self.most_open = max(self.most_open, self.loads[place].open)
        return self.first + place

    def _current_loads(self) -> dict[int, float]:
        if self.balancer.by_tokens:
            for one in self.loads:
                self._note(one.number)
        return self._known

    def _note(self, place: int) -> None:
        """Keep the load of a replica: with 100,000 replicas not all are looked at for each
        request."""
        away = AWAY if place in self.away else 0
        self._known[place] = self.balancer.load(self.loads[place]) + away

    def unknown(self, request: Request) -> int:
        """Return how many tokens of its prompt, as far as the router knows, none of these replicas
        has."""
        return len(request.prompt) - max(self.balancer.cached(request.prompt).values(), default=0)

    def hear(self, now: float, stats: Callable[[int], Mapping[str, float] | None]) -> None:
        """Ask the replicas, once in an interval, what they have to do. stats: of a scheduler; None:
        it has not begun."""
        if not self.balancer.by_tokens or now < self._next_report:
            return
        self._next_report = now + REPORT_SECONDS
        for one in self.loads:
            if (figures := stats(self.first + one.number)) is not None:
                one.tokens.ask()
                answer = figures.get("backlog_answer", 0.0)
                requests = int(figures["backlog_sequences"])
                one.tokens.report(figures["backlog_tokens"], requests, answer)

    def ended(self, number: int, request: int) -> None:
        """A request has left."""
        self.balancer.ended(self.loads[number - self.first], self._shares.pop(request, NO_SHARE))
        self._note(number - self.first)

    def open_on(self, number: int) -> int:
        """Return how many requests a replica has."""
        return self.loads[number - self.first].open

    def there(self, number: int) -> bool:
        """Return whether a replica takes requests."""
        return number - self.first not in self.away

    def close(self, number: int) -> None:
        """A replica takes no more requests."""
        self.away.add(number - self.first)
        self._note(number - self.first)

    def forget(self, number: int) -> None:
        """A replica has ended, and its KV with it."""
        self.close(number)
        self.loads[number - self.first].open = 0
        self._note(number - self.first)
        self.balancer.forget(number - self.first)

    def open_again(self, number: int) -> None:
        """A replica takes requests from now on."""
        self.away.discard(number - self.first)
        self._note(number - self.first)


def fleet_of(fleets: Sequence[SimulatedFleet], number: int) -> SimulatedFleet:
    """The one that has this replica. fleets: by their first replicas, ascending."""
    return next(fleet for fleet in reversed(fleets) if fleet.first <= number)


def fleets(
    replicas: int,
    roles: Roles | None,
    place: Callable[[], Placement],
    prefixes: Callable[[], PrefixMap | None],
    loads: str = "requests",
) -> list[SimulatedFleet]:
    """The fleets: one that computes prompts, if there are roles, and one that answers. loads: what
    a load is counted in, as `pageturner route --loads`."""
    apart = roles.prefill if roles else 0
    sizes = [(0, apart), (apart, replicas - apart)] if apart else [(0, replicas)]
    return [
        SimulatedFleet(
            first,
            [ReplicaLoad(place) for place in range(count)],
            LoadBalancer(place(), prefixes(), by_tokens=loads == "tokens"),
        )
        for first, count in sizes
    ]


def tokens_there(pool: BlockPool, request: Request, keys: list[bytes] | None = None) -> int:
    """Tokens at the beginning of its prompt whose KV is in the pool, in whole blocks. keys: as
    below."""
    found = takewhile(pool.full.index.__contains__, _keys_of(pool, request, keys))
    return pool.block_size * sum(1 for _ in found)


def _keys_of(pool: BlockPool, request: Request, keys: list[bytes] | None) -> Iterable[bytes]:
    whole = (len(request.prompt) - 1) // pool.block_size
    if keys is None:
        return pool.keys(sequence_of(request))
    return keys[:whole]


def bring_prompt(pool: BlockPool, request: Request, keys: list[bytes] | None = None) -> None:
    """Make the prompt findable whose KV has come, as far as there is room, and no block of it
    twice. keys: of its blocks and what may come behind them; None: they are those that an engine
    would make."""
    held: list[int] = []
    for key in _keys_of(pool, request, keys):
        block = pool.full.index.get(key)
        if block is None and (block := bring_up(pool.full, key)) is None:
            break
        pool.full.share([block])  # so that none of it is taken for what comes behind
        held.append(block)
    pool.full.truncate(held, 0)


# -- slower memory ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Tokens of KV that each tier of a replica holds, and seconds for which one of them comes
    up."""

    host_tokens: int = 0
    file_tokens: int = 0
    host_seconds: float = 0.0
    file_seconds: float = 0.0


class SimulatedTiers:
    """The tiers of one replica, whose blocks have so many tokens. found: tokens that came up."""

    def __init__(self, store: Store, sizes: TierSizes, block_size: int) -> None:
        self._store, self._size = store, block_size
        most = (sizes.host_tokens // block_size, sizes.file_tokens // block_size)
        self._most = most
        self._seconds = (sizes.host_seconds * block_size, sizes.file_seconds * block_size)
        self._tiers: tuple[OrderedDict[bytes, None], ...] = (OrderedDict(), OrderedDict())
        self._owed = 0.0
        self.found = 0
        add_block_hooks(store, lambda key, block: None, self._evict)
        store.on_miss = self._fetch

    def owed(self) -> float:
        """Seconds that have not been added to a step yet; now they are."""
        seconds, self._owed = self._owed, 0.0
        return seconds

    def _evict(self, key: bytes, block: int) -> None:
        self._put(0, key)

    def _put(self, tier: int, key: bytes) -> None:
        """Take in a block; the least recently used one goes a tier down for it."""
        keys = self._tiers[tier]
        keys[key] = None
        keys.move_to_end(key)
        if len(keys) > self._most[tier]:
            old, _ = keys.popitem(last=False)
            if tier + 1 < len(self._tiers):
                self._put(tier + 1, old)

    def _fetch(self, key: bytes) -> int | None:
        tier = next((i for i, keys in enumerate(self._tiers) if key in keys), None)
        if tier is None or not self._store.available:
            return None
        del self._tiers[tier][key]  # first: what is evicted for it goes down meanwhile
        block = bring_up(self._store, key)
        self._owed += self._seconds[tier]
        self.found += self._size
        return block
