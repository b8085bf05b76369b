"""Queue orders: who of the waiting is asked first. Orthogonal to the batching policy.

An order is a key, and notices for those orders that remember something. It must not touch sequences, blocks
or queues, and it never decides who is preempted: that is rank, which does not move. The orders that exist are
in policies/orders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pageturner.core.types import Sequence

Key = tuple[float, ...]


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Order:
    """The smallest key goes first.

    key     where a waiting sequence stands at a time
    look    before the keys of a step are asked for: who runs, what time it is
    queued  a sequence begins to wait, for the first time or after a preemption
    served  so many tokens were computed for a sequence, which runs, at that time
    ended   a sequence is done, for whatever reason
    """

    key: Callable[[Sequence, float], Key]
    look: Callable[[Iterable[Sequence], float], None] = _nothing
    queued: Callable[[Sequence], None] = _nothing
    served: Callable[[Sequence, int, float], None] = _nothing
    ended: Callable[[Sequence], None] = _nothing

    def arrange(self, waiting: Iterable[Sequence], running: Iterable[Sequence], now: float) -> list[Sequence]:
        """Those who wait, the first to go first."""
        self.look(running, now)
        return self.peek(waiting, now)

    def peek(self, waiting: Iterable[Sequence], now: float) -> list[Sequence]:
        """The same between two steps, without leaving a trace: by numbers that may be a step old."""
        return sorted(waiting, key=lambda seq: self.key(seq, now))
