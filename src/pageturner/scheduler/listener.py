"""Listener: what the scheduler reports to those that watch it. Orders, predictors, pinned prefixes
and counters are listeners; the scheduler knows none of them by name, and this file must not either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pageturner.request import Event
from pageturner.scheduler.types import Sequence


@dataclass(slots=True)
class StepReport:
    """A report of one committed step.

    seconds     from the plan to the commit
    tokens      computed in it, padding included; generated: tokens of answers that it brought
    events      as they are sent to the requests that wait for them
    recomputed  tokens computed once more, because their KV had been given up
    drafts      (tokens verified, tokens accepted) of each draft
    alike       seconds of each step, where the report stands for several
    """

    seconds: float
    tokens: int
    generated: int = 0
    events: list[Event] = field(default_factory=list)
    recomputed: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    alike: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Listener:
    """Functions to be called; None: it does not want to know.

    arriving   the first sequence of a request, before it is queued; may raise Refused
    queued     a sequence begins to wait, for the first time or after a preemption
    attached   (sequence, tokens): it got KV that is there already; tokens that were never computed
               for it
    preempted  a sequence, and all of its group, gave its blocks back
    served     (sequence, n, now): n tokens were computed for it, and are not part of it yet
    ended      (sequence, finish), while it still has its blocks; finish: as in Event, None: it was
               aborted. True: the listener keeps its blocks, and releases them some day
    committed  a step is part of its sequences
    stats      gauges and counters by name
    """

    arriving: Callable[[Sequence], None] | None = None
    queued: Callable[[Sequence], None] | None = None
    attached: Callable[[Sequence, int], None] | None = None
    preempted: Callable[[Sequence], None] | None = None
    served: Callable[[Sequence, int, float], None] | None = None
    ended: Callable[[Sequence, str | None], bool | None] | None = None
    committed: Callable[[StepReport], None] | None = None
    stats: Callable[[], dict[str, float]] | None = None


class Listeners:
    """Several listeners as one: for each moment the functions to be called, in order."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self.arriving = [one.arriving for one in listeners if one.arriving]
        self.queued = [one.queued for one in listeners if one.queued]
        self.attached = [one.attached for one in listeners if one.attached]
        self.preempted = [one.preempted for one in listeners if one.preempted]
        self.served = [one.served for one in listeners if one.served]
        self.ended = [one.ended for one in listeners if one.ended]
        self.committed = [one.committed for one in listeners if one.committed]
        self.stats = [one.stats for one in listeners if one.stats]
