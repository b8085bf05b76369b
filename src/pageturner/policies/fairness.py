"""Fair queueing of tenants: virtual token counters (Sheng et al., Fairness in Serving LLMs, OSDI
2024).

Owns a counter for each tenant: what it was served, in tokens of a prompt; a token of the answer
counts `output_weight` of these. The tenant with the smallest goes first, so of two that always have
work waiting neither is ahead by more than twice U = max(longest prompt, output_weight * tokens that
fit in memory), whoever sends more. A tenant that comes back with nothing waiting is lifted to the
smallest counter of those that wait: what it did not use is not saved up. Cached tokens, and those
computed again after a preemption, cost nothing.

Ageing: a tenant of which nothing was computed for `ageing` seconds, while it waits, is overtaken by
nobody but its like that came earlier. The seconds cannot count from the arrival of each request:
the backlog of the greediest tenant would be the oldest, and come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from pageturner.scheduler.types import Sequence

MAX_TENANTS = (
    4096  # remembered; beyond it the half of those without work that was served least is forgotten.
)
# Names are for the asking, so a name that is not known may be one that was forgotten: its account
# opens with the largest counter that was ever forgotten, and nobody gains by filling this memory
# with other names


@dataclass(slots=True)
class Tenant:
    """counter: tokens served, weighted; at: when last; waiting: in no order."""

    counter: float = 0.0
    at: float = -inf
    waiting: dict[Sequence, None] = field(default_factory=dict)


class Tenants:
    """The key of the order `fair`, and all it remembers."""

    def __init__(self, output_weight: float, ageing: float) -> None:
        self._output_weight = output_weight
        self._ageing = ageing
        self._tenants: dict[str, Tenant] = {}
        self._waiting: set[str] = set()
        self._floor = 0.0  # the largest counter that was forgotten
        self._last = ""  # the tenant that was the last to have nobody waiting any more
        self._billed: dict[
            Sequence, int
        ] = {}  # up to which position; of those that ran and have not ended
        self._start: dict[
            Sequence, float
        ] = {}  # the tenant's counter when all it has in front are served

    def __len__(self) -> int:
        return len(self._tenants)

    def key(self, seq: Sequence, now: float) -> tuple[float, ...]:
        request = seq.request
        if now >= max(request.arrival, self._tenants[request.tenant].at) + self._ageing:
            return (0, request.arrival, request.id)
        if seq not in self._start:  # it has come since the last step
            self.begin_step((), now)
        return (1, self._start[seq], request.arrival, request.id)

    def begin_step(self, running: Iterable[Sequence], now: float) -> None:
        """Charge each tenant, on trial, one waiting prompt after the other: a step may let several
        in."""
        self._start = {}
        for name in self._waiting:
            tenant = self._tenants[name]
            counter = tenant.counter
            for seq in sorted(tenant.waiting, key=_arrival):
                self._start[seq] = counter
                if seq not in self._billed:
                    counter += seq.prompt_len

    def queued(self, seq: Sequence) -> None:
        name = seq.request.tenant
        tenant = self._tenants.setdefault(name, Tenant(self._floor))
        if not tenant.waiting:
            others = self._waiting or {self._last} & self._tenants.keys()
            least = min((self._tenants[other].counter for other in others), default=0.0)
            tenant.counter = max(tenant.counter, least)
            self._waiting.add(name)
        tenant.waiting[seq] = None
        if len(self._tenants) > MAX_TENANTS:
            self._forget()

    def served(self, seq: Sequence, n: int, now: float) -> None:
        """The prompt is charged as soon as it is begun, then each token of the answer once it is
        there."""
        self._leave(seq)
        if (tenant := self._tenants.get(seq.request.tenant)) is None:
            return  # it was running before this order was chosen
        tenant.at = now
        billed = self._billed.get(seq)
        if billed is None:
            billed = max(seq.prompt_len, seq.computed)
            tenant.counter += max(0, seq.prompt_len - seq.computed)
        done = max(billed, min(seq.computed + n, len(seq.tokens)))
        tenant.counter += self._output_weight * (done - billed)
        self._billed[seq] = done

    def ended(self, seq: Sequence, finish: str | None) -> None:
        self._leave(seq)
        self._billed.pop(seq, None)

    def _leave(self, seq: Sequence) -> None:
        """It waits no longer, if it did."""
        name = seq.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None or seq not in tenant.waiting:
            return
        del tenant.waiting[seq]
        if not tenant.waiting:
            self._waiting.remove(name)
            self._last = name

    def _forget(self) -> None:
        busy = self._waiting | {seq.request.tenant for seq in self._billed}
        idle = sorted(self._tenants.keys() - busy, key=lambda name: self._tenants[name].counter)
        for name in idle[: (len(idle) + 1) // 2]:
            self._floor = max(self._floor, self._tenants.pop(name).counter)


def _arrival(seq: Sequence) -> tuple[float, int]:
    return (seq.request.arrival, seq.request.id)
