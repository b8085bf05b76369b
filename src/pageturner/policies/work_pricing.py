"""Work beside tokens, priced by the scheduler's one budget.

A row of logits that is told, biased, searched or scored takes time that a count of tokens does not
see, and a token of a prompt takes the longer the more positions it looks back on. The price is
taken from what the policy has left to grant: such prompts come in smaller pieces, and dear requests
run beside each other only as far as the budget carries them. So a step takes about the same time
whatever is asked for.

Owns what each ask is charged; policy_stack.py puts it around a policy. Must not know why something
is dear.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

from pageturner.scheduler.batching import Asks, View, WaitCause
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence, State

# tokens of the budget; what looks back on fewer positions than this pays for costs nothing
FREE = 1 / 8


@dataclass(slots=True)
class StepPrices:
    """The prices and the queue with which a step begins.

    waiting   the queue, in the order in which it is asked for in this step
    too_dear  waiting sequences that get nothing, because they cost too much beside those that run
    later     what each running sequence that has not asked yet needs; View.reserved is their sum
    for_long  tokens that long prompts may take in all
    """

    waiting: list[Sequence]
    too_dear: set[Sequence]
    later: dict[Sequence, float]
    for_long: float


@dataclass(slots=True)
class _Ask:
    """One request of a policy for tokens.

    row   price of a row of logits
    left  tokens of the budget that it may take
    must  whether it gets a token whatever that costs
    """

    seq: Sequence
    n: int
    row: float
    left: float
    must: bool


class WorkPricing:
    """Prices between any policy and the scheduler: `Request.row_price` for rows of logits;
    `context_price`, while others decode, for a token of a prompt, for each thousand positions
    before it.

    In a step as much is taken from the budget for dear rows as leaves a token to every other
    running sequence. Who is too dear to join now stands aside: others in the queue go on, and it
    has its old place again in the next step. One dear request can always run, whatever it costs.

    Long prompts, those that pay for looking back, leave to the short ones behind them what these
    need, up to half of a step; and while one is computed the short ones go before the next.
    """

    def __init__(self, context_price: float = 0.0) -> None:
        self._position = max(0.0, context_price) / 1000
        self._rows: dict[int, float] = {}  # request -> price of a row; only of those that have one
        # requests whose prompts are long enough to pay for looking back
        self._long: set[int] = set()

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

    @property
    def present(self) -> bool:
        """True while any request here costs more than its tokens."""
        return bool(self._rows or self._long)

    def _is_long(self, seq: Sequence) -> bool:
        return seq.request.id in self._long

    def begin_step(self, v: View) -> StepPrices:
        """Return the prices of a step, and reserve what those that run need."""
        running = (*v.decoding, *v.prefilling)
        later = {seq: 1 + self._rows.get(seq.request.id, 0.0) for seq in running}
        v.reserved = sum(later.values())
        waiting, too_dear = v.waiting, self._too_dear(v)
        if too_dear:
            waiting = [*(seq for seq in waiting if seq not in too_dear), *too_dear]
        others = v.reserved - sum(later[seq] for seq in v.prefilling if self._is_long(seq))
        for_long = v.token_budget_left - others
        if self._long and for_long >= 2:
            waiting, short = self._short_first(v, waiting)
            for_long -= min(short, for_long / 2)
        return StepPrices(waiting, set(too_dear), later, for_long)

    def charged(self, asks: Asks, v: View, prices: StepPrices) -> Asks:
        """Ask for what a policy asks for, and take from the budget what it costs."""
        dear = v.reserved > len(prices.later)  # somebody pays for rows of logits
        position = self._position if v.decoding else 0.0
        with suppress(StopIteration):
            seq, n = next(asks)
            while True:
                v.reserved -= prices.later.pop(seq, 0.0)
                row = self._rows.get(seq.request.id, 0.0)
                spendable = v.token_budget_left - v.reserved
                long = n > 1 and self._is_long(seq)
                if seq in prices.too_dear:
                    granted, v.refused = 0, (seq, WaitCause.BUDGET, 0)
                elif long or row:
                    before = v.token_budget_left
                    waits = (row and dear) or (long and prices.for_long < 1 and v.granted)
                    left = min(spendable, prices.for_long) if long else spendable
                    must = not waits or seq.state is State.RUNNING
                    granted = yield from _bought(v, _Ask(seq, n, row, left, must), position)
                    if long:
                        prices.for_long -= before - v.token_budget_left
                    dear = dear or (row > 0 and granted > 0)
                else:
                    granted = yield seq, min(n, max(1, int(spendable)))
                seq, n = asks.send(granted)

    def _short_first(self, v: View, waiting: list[Sequence]) -> tuple[list[Sequence], float]:
        """Return the queue with all long prompts but the one that is computed behind the short
        ones, and tokens that short prompts need in this step."""
        needed = sum(seq.pending for seq in v.prefilling if not self._is_long(seq))
        first = not any(map(self._is_long, v.prefilling))
        front, behind, free = list[Sequence](), list[Sequence](), v.free_slots
        for seq in waiting:
            if self._is_long(seq) and not first:
                behind.append(seq)
                continue
            front.append(seq)
            if self._is_long(seq):
                first = False
            else:
                needed += len(seq.tokens) if free > 0 else 0
                free -= 1
        return front + behind, needed

    def _too_dear(self, v: View) -> dict[Sequence, None]:
        """Return the waiting sequences that cost too much beside those that run, in queue order."""
        aside: dict[Sequence, None] = {}
        if not self._rows:
            return aside
        running = {seq.request.id: seq for seq in (*v.decoding, *v.prefilling)}
        spare = v.token_budget_left - len(v.decoding) - len(v.prefilling) - v.free_slots
        used = sum(
            price * v.slots(running[id]) for id, price in self._rows.items() if id in running
        )
        for seq in v.waiting:
            price = self._rows.get(seq.request.id, 0.0) * v.slots(seq)
            if price and used and used + price > spare:
                aside[seq] = None
            else:
                used += price
        return aside


def _bought(v: View, ask: _Ask, position: float) -> Generator[tuple[Sequence, int], int, int]:
    """Ask for as many tokens as what is left pays for, one at least if it must, and pay. Returns
    what was granted. position: price of a token of a prompt for each position before it."""
    seq, n, row, left = ask.seq, ask.n, ask.row, ask.left
    gap = seq.pending if seq.state is State.RUNNING else v.need(seq)
    scored, decodes = seq.logits_from is not None, len(seq.tokens) - seq.computed == 1
    back = 0.0 if decodes else position * (seq.pending - gap + seq.computed)
    back = back if back >= FREE else 0.0
    n = min(n, int(left / (1 + back + (row if scored or decodes else 0.0))))
    if not scored and not decodes and gap <= n and n * (1 + back) + row > left:
        n = gap - 1  # the last token of a prompt, which costs a row, waits for another step
    if n < 1 and not ask.must:
        v.refused = (seq, WaitCause.BUDGET, 0)
        return 0
    granted = yield seq, max(1, n)
    rows = granted if scored else max(0, seq.computed + granted - len(seq.tokens) + 1)
    v.limit(
        v.token_budget_left - min(ceil(granted * back + rows * row), max(0, int(left) - granted))
    )
    return granted
