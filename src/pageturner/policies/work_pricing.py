"""Work beside tokens, priced by the scheduler's one budget.

A row of logits that is told, biased, searched or scored takes time that a count of tokens does not see, and a
token of a prompt takes the longer the more positions it looks back on. The price is taken from what the
policy has left to grant: such prompts come in smaller pieces, and dear requests run beside each other only as
far as the budget carries them. So a step takes about the same time whatever is asked for.

Owns the place between a policy and the scheduler. Must not know why something is dear, or how dear.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from pageturner.scheduler.batching import Asks, Policy, View, WaitCause
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence, State

FREE = (
    1 / 8
)  # tokens of the budget; what looks back on fewer positions than this pays for costs nothing


@dataclass(slots=True)
class _Ask:
    """What a policy asks for. left: tokens of the budget behind what those need who ask later."""

    seq: Sequence
    n: int
    row: float
    left: float


class WorkPricing:
    """Prices between any policy and the scheduler: `Request.row_price` for rows of logits; `context_price`,
    while others decode, for a token of a prompt, for each thousand positions before it.

    In a step as much is taken from the budget for dear rows as leaves a token to every other running
    sequence. Who is too dear to join now stands aside: others in the queue go on, and it has its old place
    again in the next step. One dear request can always run, whatever it costs.

    Long prompts, those that pay for looking back, leave to the short ones behind them what these need, up to
    half of a step; and while one is computed the short ones go before the next.
    """

    def __init__(self, context_price: float = 0.0) -> None:
        self._position = max(0.0, context_price) / 1000
        self._rows: dict[int, float] = {}  # request -> price of a row; only of those that have one
        self._long: set[int] = (
            set()
        )  # requests whose prompts are long enough to pay for looking back

    @property
    def listener(self) -> Listener:
        return Listener(queued=self._queued, ended=self._ended)

    def _queued(self, seq: Sequence) -> None:
        if seq.request.row_price:
            self._rows[seq.request.id] = seq.request.row_price
        if len(seq.tokens) * self._position >= FREE:
            self._long.add(seq.request.id)

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        self._rows.pop(seq.request.id, None)
        self._long.discard(seq.request.id)

    def wrap_policy(self, policy: Policy) -> Policy:
        """The same policy, whose grants are charged with what they cost. One whose steps nothing bounds stays
        as it is: it computes prompts whole."""
        if not policy.bounded:
            return policy
        inner = policy.asks

        def asks(v: View) -> Asks:
            return self._charged(inner, v) if self._rows or self._long else inner(v)

        return replace(policy, asks=asks)

    def _charged(self, inner: Callable[[View], Asks], v: View) -> Asks:
        later = {
            seq: 1 + self._rows.get(seq.request.id, 0.0) for seq in (*v.decoding, *v.prefilling)
        }
        owed = sum(later.values())
        aside = self._stand_aside(v, v.token_budget_left - len(later) - v.free_slots)
        others = owed - sum(later[seq] for seq in v.prefilling if seq.request.id in self._long)
        for_long = (
            v.token_budget_left
            - others
            - self._kept_for_short(v, (v.token_budget_left - others) / 2)
        )
        dear, position = owed > len(later), self._position if v.decoding else 0.0
        asks = inner(v)
        with suppress(StopIteration):
            seq, n = next(asks)
            while True:
                owed -= later.pop(seq, 0.0)
                row = self._rows.get(seq.request.id, 0.0)
                if seq in aside:
                    granted, v.refused = 0, (seq, WaitCause.BUDGET, 0)
                elif (long := n > 1 and seq.request.id in self._long) or row:
                    must = not ((row and dear) or (long and for_long < 1 and v.granted))
                    before, left = v.token_budget_left, v.token_budget_left - owed
                    ask = _Ask(seq, n, row, min(left, for_long) if long else left)
                    granted = yield from _bought(
                        v, ask, position, must or seq.state is State.RUNNING
                    )
                    for_long -= before - v.token_budget_left if long else 0
                    dear = dear or (row > 0 and granted > 0)
                else:
                    granted = yield seq, min(n, max(1, int(v.token_budget_left - owed)))
                seq, n = asks.send(granted)

    def _kept_for_short(self, v: View, most: float) -> float:
        """Tokens that short prompts need in this step, who then wait in front of all long ones but the first:
        at most so many."""
        if not self._long or most < 1:
            return 0.0
        needed: float = sum(seq.pending for seq in v.prefilling if seq.request.id not in self._long)
        first = not any(seq.request.id in self._long for seq in v.prefilling)
        front, behind, joins = list[Sequence](), list[Sequence](), v.free_slots
        for seq in v.waiting:
            if seq.request.id not in self._long:
                needed += len(seq.tokens) if joins > 0 else 0
                joins -= 1
            elif not first:
                behind.append(seq)
                continue
            else:
                first = False
            front.append(seq)
        if behind:
            v.waiting = front + behind
        return min(needed, most)

    def _stand_aside(self, v: View, spare: int) -> set[Sequence]:
        """Those who would join and are too dear beside those who run, put behind the others."""
        if not self._rows:
            return set()
        running = {seq.request.id: seq for seq in (*v.decoding, *v.prefilling)}
        used = sum(
            price * v.slots(running[id]) for id, price in self._rows.items() if id in running
        )
        aside: dict[Sequence, None] = {}
        for seq in v.waiting:
            price = self._rows.get(seq.request.id, 0.0) * v.slots(seq)
            if price and used and used + price > spare:
                aside[seq] = None
            else:
                used += price
        if aside:
            v.waiting = [*(seq for seq in v.waiting if seq not in aside), *aside]
        return set(aside)


def _bought(
    v: View, ask: _Ask, position: float, must: bool
) -> Generator[tuple[Sequence, int], int, int]:
    """Ask for as many tokens as what is left pays for, one at least if it must, and pay. Returns what was
    granted. position: price of a token of a prompt for each position before it."""
    seq, n, row, left = ask.seq, ask.n, ask.row, ask.left
    gap = seq.pending if seq.state is State.RUNNING else v.need(seq)
    scored, decodes = seq.logits_from is not None, len(seq.tokens) - seq.computed == 1
    back = 0.0 if decodes else position * (seq.pending - gap + seq.computed)
    back = back if back >= FREE else 0.0
    n = min(n, int(left / (1 + back + (row if scored or decodes else 0.0))))
    if not scored and not decodes and gap <= n and n * (1 + back) + row > left:
        n = gap - 1  # the last token of a prompt, which costs a row, waits for another step
    if n < 1 and not must:
        v.refused = (seq, WaitCause.BUDGET, 0)
        return 0
    granted = yield seq, max(1, n)
    rows = granted if scored else max(0, seq.computed + granted - len(seq.tokens) + 1)
    v.limit(
        v.token_budget_left - min(ceil(granted * back + rows * row), max(0, int(left) - granted))
    )
    return granted
