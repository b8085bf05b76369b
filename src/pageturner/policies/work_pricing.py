"""Work beside tokens, priced by the scheduler's one budget.

A row of logits that is told, biased, searched or scored takes time that a count of tokens does not see. Its
price is taken from what the policy has left to grant: prompts whose logprobs are wanted come in smaller
pieces, and dear requests run beside each other only as far as the budget carries them. So a step takes about
the same time whatever is asked for.

Owns the place between a policy and the scheduler. Must not know why something is dear, or how dear.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from math import ceil

from pageturner.core.batching import Asks, Policy, View, WaitCause
from pageturner.core.listener import Listener
from pageturner.core.types import Sequence, State


class WorkPricing:
    """Prices of the requests that are here, between any policy and the scheduler.

    In a step as much is taken from the budget for dear rows as leaves a token to every other running
    sequence. Who is too dear to join now stands aside: others in the queue go on, and it has its old place
    again in the next step. One dear request can always run, whatever it costs.
    """

    def __init__(self) -> None:
        self._rows: dict[int, float] = {}  # request -> price of a row; only of those that are not free

    @property
    def listener(self) -> Listener:
        return Listener(queued=self._queued, ended=self._ended)

    def _queued(self, seq: Sequence) -> None:
        if seq.request.row_price:
            self._rows[seq.request.id] = seq.request.row_price

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        self._rows.pop(seq.request.id, None)

    def priced(self, policy: Policy) -> Policy:
        """The same policy, whose grants are charged with what they cost. One whose steps nothing bounds stays
        as it is: it computes prompts whole."""
        if not policy.bounded:
            return policy
        inner = policy.asks
        return replace(policy, asks=lambda v: self._charged(inner, v) if self._rows else inner(v))

    def _charged(self, inner: Callable[[View], Asks], v: View) -> Asks:
        owed = {seq: self._rows.get(seq.request.id, 0.0) for seq in (*v.decoding, *v.prefilling)}
        aside = self._stand_aside(v, v.left - len(owed) - v.joins)
        asks, dear = inner(v), any(owed.values())
        with suppress(StopIteration):
            seq, n = next(asks)
            while True:
                owed.pop(seq, None)
                left = v.left - len(owed) - sum(owed.values())  # behind what those need that ask later
                if seq in aside:
                    granted, v.refused = 0, (seq, WaitCause.BUDGET, 0)
                elif price := self._rows.get(seq.request.id):
                    must = not dear or seq.state is State.RUNNING
                    granted = yield from _bought(v, seq, n, price, left, must)
                    dear = dear or granted > 0
                else:
                    granted = yield seq, min(n, max(1, int(left)))
                seq, n = asks.send(granted)

    def _stand_aside(self, v: View, spare: int) -> set[Sequence]:
        """Those who would join and are too dear beside those who run, put behind the others."""
        running = {seq.request.id: seq for seq in (*v.decoding, *v.prefilling)}
        used = sum(price * v.slots(running[id]) for id, price in self._rows.items() if id in running)
        aside: dict[Sequence, None] = {}
        for seq in v.waiting:
            price = self._rows.get(seq.request.id, 0.0) * v.slots(seq)
            if price and used and used + price > spare:
                aside[seq] = None
            used += 0.0 if seq in aside else price
        if aside:
            v.waiting = [*(seq for seq in v.waiting if seq not in aside), *aside]
        return set(aside)


def _bought(
    v: View, seq: Sequence, n: int, price: float, left: float, must: bool
) -> Generator[tuple[Sequence, int], int, int]:
    """Ask for as many of n tokens as `left` pays for, one at least if it must, and pay. Returns what was
    granted."""
    scored, gap = seq.logits_from is not None, v.need(seq)
    if scored or len(seq.tokens) - seq.computed == 1:  # every token is a row, drafts too
        n = min(n, int(left / (1 + price)))
    elif gap + price > left:  # the last token of a prompt, which costs a row, waits for another step
        n = min(n, gap - 1)
    if n < 1 and not must:
        v.refused = (seq, WaitCause.BUDGET, 0)
        return 0
    granted = yield seq, max(1, n)
    rows = granted if scored else max(0, seq.computed + granted - len(seq.tokens) + 1)
    v.limit(v.left - min(ceil(rows * price), max(0, int(left) - granted)))
    return granted
