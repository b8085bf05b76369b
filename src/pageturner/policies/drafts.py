"""Drafts, priced: how many proposed tokens a step verifies over its whole batch.

Owns what proposers of drafts share: their protocol, what they remember of each sequence, and the
one budget of a step. A wrong draft costs time and changes no answer, so whatever is kept here may
be lost at any moment, and a plan that runs twice before its commit may get other drafts. Must not know
how a proposer guesses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from pageturner.scheduler.types import Item, Output, Sequence

T = TypeVar("T")
MAX_DRAFTED = 48  # tokens of all drafts of a step
ROWS = 4.0  # a step of n rows takes about 1 + n / ROWS, until it is measured: bench/LOG.md
LEAST_GAIN = 1.1  # a row must bring so much more than it costs, since prices are estimates
RATE = 0.1  # what the newest step weighs in a mean
TRUST = 2.0  # expected tokens with which a request begins: as right as the proposer says


class Proposer(Protocol):
    """A proposer whose drafts are priced. nbytes: memory that it keeps for all sequences."""

    nbytes: int

    def propose(self, items: Tokens[Item], outputs: Tokens[Output], least: float) -> None:
        """Write the next draft of every sequence that is at its end into its output, and beside it
        how likely each token is if those before it are right (`Output.chances`). least: a first
        token that is less likely does not pay."""


class SequenceMemory(Generic[T]):
    """A drafter's memory of each sequence, for as long as there is the sequence."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: WeakKeyDictionary[Sequence, T] = WeakKeyDictionary()

    def of(self, seq: Sequence) -> T:
        kept = self._known.get(seq)
        if kept is None:
            kept = self._known[seq] = self._make()
        return kept


class RowPrices:
    """The measured seconds of decoding steps: by how many sequences decode, and what a drafted row
    adds, as a share of the step. A share that was not measured lately returns to what arithmetic
    says, so that one slow step does not end drafts for good."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._shares: dict[int, float] = {}

    def row(self, sequences: int) -> float:
        """The time of a drafted row over that of a step of so many sequences without drafts."""
        return self._shares.get(sequences, 1 / (ROWS + sequences))

    def took(self, sequences: int, drafted: int, seconds: float) -> None:
        """A step of so many sequences and drafted tokens, without prompts, was made. A clock that
        stood still says nothing."""
        if seconds <= 0:
            return
        usual = self._steps.get(sequences, seconds)
        first = 1 / (ROWS + sequences)
        share = self._shares.get(sequences, first)
        if drafted:
            seen = (seconds / usual - 1) / drafted
            seen = min(max(seen, first / 4), 2 * first)
            weight = min(drafted * first, 1.0) ** 2 / 2  # what hardly grew a step says little
        else:
            self._steps[sequences] = usual + RATE * (min(seconds, 2 * usual) - usual)
            seen = first
            weight = RATE / 10
        self._shares[sequences] = share + weight * (seen - share)


class _Account:
    """The drafts of one request: the tokens that were expected to be right, and those that were."""

    __slots__ = ("chances", "expected", "right")

    def __init__(self) -> None:
        self.right = self.expected = TRUST
        self.chances: list[float] = []

    @property
    def factor(self) -> float:
        return min(self.right / self.expected, 1.1)

    def verified(self, accepted: int, drafted: int) -> None:
        keep = 1 - RATE
        tried = sum(self.chances[: min(accepted + 1, drafted)])
        self.right = keep * self.right + RATE * TRUST + accepted
        self.expected = keep * self.expected + RATE * TRUST + tried


class PricedDrafts:
    """A proposer within the budget of a step.

    Every drafted token is a row of the next step. Rows cost alike, so the best choice over all
    sequences takes tokens by their chance of being accepted, the likeliest first, while the next
    one brings more tokens a second than the step would have without it.

    clock  seconds; in a simulator its own
    """

    watch = None  # it needs no hidden rows

    def __init__(self, proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.nbytes = proposer.nbytes
        self.prices = RowPrices()
        self._proposer, self._clock = proposer, clock
        self._accounts = SequenceMemory(_Account)
        self._last: tuple[Sequence | None, float] = (None, 0.0)

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        self._learn(items, outputs)
        sequences = sum(1 for output in outputs if output.tokens)
        if not sequences:
            return
        least = LEAST_GAIN * sequences * self.prices.row(sequences)
        self._proposer.propose(items, outputs, least)
        drafts = []
        for item, output in zip(items, outputs, strict=True):
            if output.draft:
                account = self._accounts.of(item.sequence)
                account.chances = output.chances
                drafts.append((output, _joint(output.chances, account.factor)))
        if drafts:
            self._cut(drafts, sequences)

    def _cut(self, drafts: list[tuple[Output, list[float]]], sequences: int) -> None:
        """Shorten each draft to the tokens that pay."""
        row = self.prices.row(sequences)
        tokens = float(sequences)
        step = 1.0
        least = 2.0
        ties = 0  # of the least chance that pays
        chances = sorted((chance for _, each in drafts for chance in each), reverse=True)
        for chance in chances[:MAX_DRAFTED]:
            if chance * step <= LEAST_GAIN * row * tokens:
                break
            tokens += chance
            step += row
            if chance != least:
                ties = 0
            ties += 1
            least = chance
        for output, each in drafts:
            as_good = min(ties, each.count(least))
            ties -= as_good
            del output.draft[sum(chance > least for chance in each) + as_good :]

    def _learn(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        """Take in what the step took that ends now, if it only decoded, and how drafts did."""
        now = self._clock()
        drafted = 0
        plain = True
        for item, output in zip(items, outputs, strict=True):
            if item.n > 1:
                count = item.drafted
                drafted += count
                plain &= item.n == count + 1
                if count and output.tokens:
                    account = self._accounts.of(item.sequence)
                    account.verified(len(output.tokens) - 1, count)
        before, begin = self._last
        first = items[0].sequence
        if plain and before is first:
            self.prices.took(len(items), drafted, now - begin)
        self._last = first, now


def _joint(chances: Tokens[float], factor: float) -> list[float]:
    """The chance that a token and all before it are right."""
    found = []
    joint = 1.0
    for chance in chances:
        joint *= min(chance * factor, 0.99)
        found.append(joint)
    return found
