"""Drafts: tokens that a step could verify beside the one that it computes anyway.

Owns the guess and how long it is. What is wrong in it costs time and changes no answer, so that
what is kept here of a sequence may be lost at any moment. Running a plan twice before its commit
gives the same drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from pageturner.kernels.base import Array
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Plan, Sequence

T = TypeVar("T")
MAX_REMEMBERED = 1024
LONGEST, SHORTEST = 4, 2  # n-grams that are looked up, the longest that is known first
FIRST = 3  # tokens of a first draft
LONGEST_REST = 32  # steps without a draft after some that were wrong
ROWS = 4.0  # measured: bench/LOG.md
LEAST_GAIN = 1.03  # below this speed a draft is not worth its risk
FADING = 0.9  # what the outcome of a draft weighs, one draft later
GUESS = (3.0, 4.0)  # how a sequence begins: so many of so many drafted tokens were right


class Drafter(Protocol):
    """A proposer of drafts.

    nbytes  memory that it keeps for all sequences together
    watch   called in each step, before `propose`, with the hidden rows of all its tokens; None:
            only those that logits are made of need to be computed
    """

    nbytes: int

    @property
    def watch(self) -> Callable[[Plan, Array], None] | None: ...

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        """Write the next draft of every sequence that is at its end into its output."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of drafting.

    step  of the draft model over one of the target, in time
    rows  of a step whose products take as long as reading the weights: n rows take 1 + n / rows
    """

    step: float
    rows: float = ROWS

    def gain(self, chance: float, sequences: int, length: int) -> float:
        """Tokens with drafts over tokens without, in the same time, if each drafted token is right
        with `chance`. Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, for several sequences
        at once and rows that are not free."""
        expected = sum(chance**i for i in range(length + 1))
        alone = 1 + sequences / self.rows
        return expected * alone / (alone + length * (sequences / self.rows + self.step * alone))


@lru_cache(maxsize=4096)
def best_length(costs: Costs, percent: int, sequences: int, most: int) -> tuple[int, float]:
    """The length of a draft that gains most, if so many of a hundred tokens are right, and the
    gain; 0 and 1 where none is worth it."""
    gains = [
        (costs.gain(percent / 100, sequences, length), length) for length in range(1, most + 1)
    ]
    best, length = max(gains, default=(0.0, 0))
    return (length, best) if best >= LEAST_GAIN else (0, 1.0)


class SequenceMemory(Generic[T]):
    """A drafter's memory of each sequence, for the MAX_REMEMBERED that it was asked about last.
    Another request of a known id begins anew."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[int, int], tuple[Request, T]] = OrderedDict()

    def of(self, seq: Sequence) -> T:
        key = (seq.request.id, seq.index)
        request, kept = self._known.get(key, (None, None))
        if kept is None or request is not seq.request:
            kept = self._make()
            self._known[key] = seq.request, kept
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return kept


class _NGramIndex:
    """The n-grams of one sequence: where its n-grams ended last, and how its drafts did."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> position behind it
        self.length = 0  # tokens that are in `ends`
        self.draft: list[int] = []  # proposed at this length
        self.size, self.misses, self.rest = FIRST, 0, 0
        self.right, self.drafted = GUESS

    def follow(self, tokens: list[int]) -> None:
        """Take in what came since the last call: how the draft did, and the n-grams. Those that end
        with the last token are left out: they would find themselves."""
        if self.draft:
            accepted = len(tokens) - self.length - 1
            self._learn(accepted)
        elif self.rest:
            self.rest -= 1
        for end in range(max(self.length, SHORTEST), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.length = len(tokens)

    def _learn(self, accepted: int) -> None:
        self.right = FADING * self.right + min(accepted, len(self.draft))
        self.drafted = FADING * self.drafted + min(accepted + 1, len(self.draft))
        if accepted >= len(self.draft):
            self.size, self.misses = 2 * self.size + 1, 0
        elif accepted:
            self.size, self.misses = accepted + 1, 0
        else:
            self.misses += 1
            self.size, self.rest = FIRST, min(2**self.misses - 2, LONGEST_REST)

    def guess(self, tokens: list[int], most: int) -> list[int]:
        if self.rest:
            return []
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self.ends.get(tuple(tokens[len(tokens) - n :]))
            if end is not None:
                return tokens[end : end + min(self.size, most)]
        return []


LOOKUP = Costs(step=0.0)


class PromptLookup:
    """The continuation of the last place in prompt and output where the newest tokens stood before.

    most  tokens of a draft. A draft that was right all through makes the next one longer, a wrong
          one shorter; after several wrong ones there are none for a while. Beside other sequences,
          whose rows are not free, it is no longer than gains by what share of the tokens has been
          right.
    """

    watch = None

    def __init__(self, most: int = 7, costs: Costs = LOOKUP) -> None:
        self.nbytes = 0
        self._most, self._costs = most, costs
        self._indexes = SequenceMemory(_NGramIndex)

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        for item, output in zip(items, outputs, strict=True):
            if output.tokens and item.sequence.request.params.speculation:
                output.draft = self._draft(item.sequence, output.tokens, len(items))

    def _draft(self, seq: Sequence, new: list[int], sequences: int) -> list[int]:
        tokens = [*seq.tokens, *new]
        index = self._indexes.of(seq)
        if index.length != len(tokens):
            index.follow(tokens)
            most = self._most
            if sequences > 1:
                share = round(100 * index.right / index.drafted)
                most, _ = best_length(self._costs, share, sequences, most)
            index.draft = index.guess(tokens, most) if most else []
        return list(index.draft)
