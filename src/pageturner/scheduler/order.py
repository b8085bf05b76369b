"""Queue orders: which waiting sequence is asked for first. Orthogonal to the batching policy.

An order is a key, and a listener for those orders that remember something (policies/orders.py). It
must not touch sequences, blocks or queues, and it never decides which sequence is preempted: that
is rank, which does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """The smallest key goes first.

    key         where a waiting sequence stands at a time
    begin_step  called before the keys of a step are asked for, with the running sequences and the
                time
    listener    what it wants to hear
    """

    key: Callable[[Sequence, float], Key]
    begin_step: Callable[[Iterable[Sequence], float], None] = lambda running, now: None
    listener: Listener = field(default_factory=Listener)

    def arrange(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence], now: float
    ) -> list[Sequence]:
        """Return the waiting sequences, the first to go first."""
        self.begin_step(running, now)
        return self.peek(waiting, now)

    def peek(self, waiting: Iterable[Sequence], now: float) -> list[Sequence]:
        """The same between two steps, without leaving a trace: by numbers that may be a step
        old."""
        return sorted(waiting, key=lambda seq: self.key(seq, now))
