"""Batching policies: who gets how many tokens in this step.

A policy is a generator. It asks for (sequence, n) and is told how many tokens were granted: fewer if the
budget or the memory ends, 0 if it did not fit. It must not touch a sequence, a block or a queue; what it
wants beyond asking it says through its View.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pageturner.core.admission import Reserve
from pageturner.core.types import Sequence
from pageturner.policies.step_time import StepTimeModel


@dataclass(slots=True)
class View:
    """What a policy sees of one step. The lists are snapshots; asking does not change them.

    decoding    running, only the newest token to compute; smallest rank first
    prefilling  running, more than that to compute; smallest rank first
    waiting     in queue order; empty when nobody may join
    left        tokens of the budget not granted yet
    granted     tokens granted so far
    joins       how many waiting sequences may join at most
    need        tokens a sequence would compute in a step without a budget, given what is cached
    peak        positions whose KV a sequence will hold at the very most
    slots       running sequences that a waiting one becomes
    together    how many sequences of so many tokens fit side by side
    context     most tokens in a sequence
    reserve     what must be free for whoever joins; a policy may put its own rule in the place of `admission`
    pace        what steps took so far
    asked       the last that was asked for; most: how many may run
    patient     whoever could share what another one is just computing waits for it
    """

    now: float
    decoding: list[Sequence]
    prefilling: list[Sequence]
    waiting: list[Sequence]
    left: int
    joins: int
    context: int
    need: Callable[[Sequence], int]
    peak: Callable[[Sequence], int]
    slots: Callable[[Sequence], int]
    together: Callable[[int], int]
    reserve: Reserve
    pace: StepTimeModel
    most: int
    granted: int = 0
    asked: Sequence | None = None
    patient: bool = True
    wake: float | None = None
    ballast: list[tuple[int, int]] = field(default_factory=list)

    def lift(self, n: int) -> None:
        """Allow this step at least `n` more tokens, over the budget if need be: for what cannot be split."""
        self.left = max(self.left, n)

    def limit(self, n: int) -> None:
        """Allow this step at most `n` more tokens."""
        self.left = min(self.left, n)

    def pad(self, rows: int, context: int) -> None:
        """Have `rows` rows of padding computed that see `context` positions."""
        self.ballast.append((rows, context))
        self.left -= rows


Asks = Generator[tuple[Sequence, int], int, None]
Policy = Callable[[View], Asks]


def chunked(v: View) -> Asks:
    """Stall-free: a token for every decoding sequence, then chunks of prefill in the rest of the budget."""
    for s in v.decoding:
        yield s, s.pending
    for s in v.prefilling:
        yield s, s.pending
    for s in v.waiting:
        if not (yield s, s.pending):
            return
