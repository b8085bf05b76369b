"""Listener: what the scheduler tells those who watch it. Orders, predictors, pinned prefixes and counters are
listeners; the scheduler knows none of them by name.

Owns the moments at which they are called. Must not know who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pageturner.core.types import Event, Plan, Sequence


class StepReport(NamedTuple):
    """What one committed step brought.

    events      as they are told to whoever waits for them
    seconds     from the plan to the commit
    recomputed  tokens computed once more, because their KV had been given up
    drafts      (tokens verified, tokens accepted) of each draft in the step
    """

    events: list[Event]
    seconds: float
    recomputed: int
    drafts: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Listener:
    """Functions to be called; None: it does not want to know.

    arriving   (first sequence of a request, what tells how many positions a request that is here can need at
               the most), before the request is queued; may raise Refused
    queued     a sequence begins to wait, for the first time or after a preemption
    attached   (sequence, tokens): it got KV that is there already; tokens that were never computed for it
    preempted  a sequence, and all of its group, gave its blocks back
    served     (sequence, n, now): n tokens were computed for it, and are not part of it yet
    ended      (sequence, finish), while it still has its blocks; finish: as in Event, None: it was aborted.
               True: the listener keeps its blocks, and releases them some day
    committed  a step is part of its sequences
    stats      gauges and counters by name
    """

    arriving: Callable[[Sequence, Callable[[], int]], None] | None = None
    queued: Callable[[Sequence], None] | None = None
    attached: Callable[[Sequence, int], None] | None = None
    preempted: Callable[[Sequence], None] | None = None
    served: Callable[[Sequence, int, float], None] | None = None
    ended: Callable[[Sequence, str | None], bool | None] | None = None
    committed: Callable[[Plan, StepReport], None] | None = None
    stats: Callable[[], dict[str, float]] | None = None


class Listeners:
    """Several listeners as one: for each moment the functions of those who want to know, in their order."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self.arriving = [one.arriving for one in listeners if one.arriving]
        self.queued = [one.queued for one in listeners if one.queued]
        self.attached = [one.attached for one in listeners if one.attached]
        self.preempted = [one.preempted for one in listeners if one.preempted]
        self.served = [one.served for one in listeners if one.served]
        self.ended = [one.ended for one in listeners if one.ended]
        self.committed = [one.committed for one in listeners if one.committed]
        self.stats = [one.stats for one in listeners if one.stats]
