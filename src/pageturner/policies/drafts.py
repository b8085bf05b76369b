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

from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Sequence

T = TypeVar("T")
MAX_DRAFTED = 48  # tokens of all drafts of a step
ROWS = 4.0  # a step of n rows takes about 1 + n / ROWS, until it is measured: bench/LOG.md
DEVICE_ROWS = 16.0  # the same where steps are launched ahead on a device
LEAST_GAIN = 1.1  # a row must bring so much more than it costs, since prices are estimates
RATE = 0.1  # what the newest step weighs in a mean
TRUST = 2.0  # expected tokens with which a request begins: as right as drafts of others were
RETURN = 0.005  # what a step gives back of the trust that drafts of all requests have lost
WAIT = 1.5  # what a step that waits for the tokens before it takes of one that was launched ahead


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
    says, so that one slow step does not end drafts for good.

    rows  that take as long as all else of a step, until it is measured
    """

    def __init__(self) -> None:
        self.rows = ROWS
        self._steps: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._ahead: dict[int, float] = {}  # of steps that were launched ahead

    def row(self, sequences: int) -> float:
        """The time of a drafted row over that of a step of so many sequences without drafts."""
        return self._shares.get(sequences, 1 / (self.rows + sequences))

    def wait(self, sequences: int) -> float:
        """The time of a step that waits for the tokens before it over that of one that need not."""
        if sequences not in self._ahead:
            return WAIT
        return max(1.0, self._steps[sequences] / self._ahead[sequences])

    def took_ahead(self, sequences: int, seconds: float) -> None:
        """A step of so many sequences, without prompts, was launched before the result of the one
        in front of it."""
        if seconds <= 0:
            return
        ahead = self._ahead.get(sequences, seconds)
        ahead += RATE * (min(seconds, 2 * ahead) - ahead)
        usual = self._steps.get(sequences, WAIT * ahead)
        self._ahead[sequences] = ahead
        self._steps[sequences] = usual + RATE / 10 * (WAIT * ahead - usual)

    def took(self, sequences: int, drafted: int, seconds: float) -> None:
        """A step of so many sequences and drafted tokens, without prompts, was made. A clock that
        stood still says nothing."""
        if seconds <= 0:
            return
        usual = self._steps.get(sequences, seconds)
        first = 1 / (self.rows + sequences)
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

    def __init__(self, right: float) -> None:
        self.right = right
        self.expected = TRUST
        self.chances: list[float] = []

    @property
    def factor(self) -> float:
        return min(self.right / self.expected, 1.1)

    def verified(self, accepted: int, drafted: int) -> float:
        """Note how a draft did; returns how many tokens of it were expected to be right."""
        keep = 1 - RATE
        tried = sum(self.chances[: min(accepted + 1, drafted)])
        self.right = keep * self.right + RATE * TRUST + accepted
        self.expected = keep * self.expected + RATE * TRUST + tried
        return tried


class PricedDrafts:
    """A proposer within the budget of a step.

    Every drafted token is a row of the next step. Rows cost alike, so the best choice over all
    sequences takes tokens by their chance of being accepted, the likeliest first, while the next
    one brings more tokens a second than the step would have without it.

    Where steps are launched ahead, one with drafts cannot be: it waits for the tokens in front of
    it. So drafts must make up for that too, and the proposer may take no longer than the device
    leaves the host to spare.

    clock  seconds; in a simulator its own
    """

    watch = None  # it needs no hidden rows

    def __init__(self, proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.nbytes = proposer.nbytes
        self.prices = RowPrices()
        self._proposer, self._clock = proposer, clock
        self._accounts = SequenceMemory(self._open)
        self._trust = 1.0  # tokens that were right over those expected, of drafts lately
        self._last: tuple[Sequence | None, float] = (None, 0.0)
        self._took = 0.0  # seconds of the proposer for a sequence
        self._foreseen: Callable[[Request], bool] | None = None

    def steps_ahead(self, foreseen: Callable[[Request], bool]) -> None:
        """Steps of these requests are launched ahead on a device where none has a draft."""
        self._foreseen = foreseen
        self.prices.rows = DEVICE_ROWS

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        self._learn(items, outputs)
        if (sequences := _decoding(outputs)) and (drafts := self._ask(items, outputs, sequences)):
            self._cut(drafts, items, sequences)

    def follow(
        self,
        items: Tokens[Item],
        outputs: Tokens[Output],
        *,
        ahead: bool,
        spare: float,
        last: bool = False,
    ) -> bool:
        """Take in a step that was launched, ahead of the result of the one in front of it or not.
        Returns whether drafts are likely to pay behind the step under way, which nothing should be
        launched behind then.

        spare  seconds that the host waited for this step
        last   none is under way behind it, and drafts are written as `propose` does
        """
        self._learn(items, outputs, ahead=ahead)
        sequences = _decoding(outputs)
        if not sequences or (not last and 2 * self._took * sequences > spare):
            return False
        begin = self._clock()
        drafts = self._ask(items, outputs, sequences)
        self._took += RATE * ((self._clock() - begin) / sequences - self._took)
        if last:
            self._cut(drafts, items, sequences)
            return False
        for output, _ in drafts:
            output.draft = []
        # the first token of each is what the step under way gives
        return self._paying([each[1:] for _, each in drafts], items, sequences)[1] > 0

    def _open(self) -> _Account:
        return _Account(TRUST * self._trust)

    def _ask(
        self, items: Tokens[Item], outputs: Tokens[Output], sequences: int
    ) -> list[tuple[Output, list[float]]]:
        """Return the outputs with a draft, and how likely all of it is right up to each token."""
        least = LEAST_GAIN * sequences * self.prices.row(sequences)
        self._proposer.propose(items, outputs, least)
        drafts = []
        for item, output in zip(items, outputs, strict=True):
            if output.draft:
                account = self._accounts.of(item.sequence)
                account.chances = output.chances
                drafts.append((output, _joint(output.chances, account.factor)))
        return drafts

    def _cut(
        self, drafts: list[tuple[Output, list[float]]], items: Tokens[Item], sequences: int
    ) -> None:
        """Shorten each draft to the tokens that pay."""
        least, ties = self._paying([each for _, each in drafts], items, sequences)
        for output, each in drafts:
            as_good = min(ties, each.count(least))
            ties -= as_good
            del output.draft[sum(chance > least for chance in each) + as_good :]

    def _paying(
        self, drafts: list[list[float]], items: Tokens[Item], sequences: int
    ) -> tuple[float, int]:
        """Return the least chance of a token that pays, and how many of that chance do."""
        row = self.prices.row(sequences)
        tokens = float(sequences)
        step = 1.0
        least = 2.0
        ties = 0
        chances = sorted((chance for each in drafts for chance in each), reverse=True)
        for chance in chances[:MAX_DRAFTED]:
            if chance * step <= LEAST_GAIN * row * tokens:
                break
            tokens += chance
            step += row
            if chance != least:
                ties = 0
            ties += 1
            least = chance
        foreseen = self._foreseen
        wait = 0.0
        if ties and foreseen and all(foreseen(item.sequence.request) for item in items):
            wait = self.prices.wait(sequences)
        if tokens <= LEAST_GAIN * wait * step * sequences:
            return 2.0, 0
        return least, ties

    def _learn(self, items: Tokens[Item], outputs: Tokens[Output], *, ahead: bool = False) -> None:
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
                    accepted = len(output.tokens) - 1
                    tried = self._accounts.of(item.sequence).verified(accepted, count)
                    if tried:
                        self._trust += RATE * (min(accepted / tried, 1.0) - self._trust)
        self._trust += RETURN * (1 - self._trust)
        before, begin = self._last
        first = items[0].sequence
        if plain and before is first:
            if ahead:
                self.prices.took_ahead(len(items), now - begin)
            else:
                self.prices.took(len(items), drafted, now - begin)
        self._last = first, now


def _decoding(outputs: Tokens[Output]) -> int:
    return sum(1 for output in outputs if output.tokens)


def _joint(chances: Tokens[float], factor: float) -> list[float]:
    """The chance that a token and all before it are right."""
    found = []
    joint = 1.0
    for chance in chances:
        joint *= min(chance * factor, 0.99)
        found.append(joint)
    return found
