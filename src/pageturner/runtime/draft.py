"""Drafts: tokens that a step could verify beside the one that it computes anyway.

Owns the guess and how long it is. What is wrong in it costs time and changes no answer, so that what is kept
here of a sequence may be lost at any moment. Running a plan twice before its commit gives the same drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Generic, Protocol, TypeVar

from pageturner.core.types import Item, Output, Request, Sequence

T = TypeVar("T")
MOST_ROWS = 48  # of a step with drafts: beyond that a row costs about what it can save
MOST_TRAILS = 1024
LONGEST, SHORTEST = 4, 2  # n-grams that are looked up, the longest that is known first
FIRST = 3  # tokens of a first draft
LONGEST_REST = 32  # steps without a draft after some that were wrong


class Drafter(Protocol):
    """Who proposes drafts. nbytes: memory that it keeps for all sequences together."""

    nbytes: int

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        """Write the next draft of every sequence that is at its end into its output."""


class Trails(Generic[T]):
    """What a drafter keeps of each sequence, for the MOST_TRAILS that it was asked about last. Another
    request of a known id begins anew."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[int, int], tuple[Request, T]] = OrderedDict()

    def of(self, seq: Sequence) -> T:
        key = (seq.request.id, seq.index)
        request, trail = self._known.get(key, (None, None))
        if trail is None or request is not seq.request:
            trail = self._make()
            self._known[key] = seq.request, trail
            if len(self._known) > MOST_TRAILS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return trail


class _Trail:
    """What is known of one sequence: where its n-grams ended last, and how its drafts did."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> position behind it
        self.length = 0  # tokens that are in `ends`
        self.draft: list[int] = []  # proposed at this length
        self.size, self.misses, self.rest = FIRST, 0, 0

    def follow(self, tokens: list[int]) -> None:
        """Take in what came since the last call: how the draft did, and the n-grams. Those that end with the
        last token are left out: they would find themselves."""
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


class PromptLookup:
    """The continuation of the last place in prompt and output where the newest tokens stood before.

    most  tokens of a draft. A draft that was right all through makes the next one longer, a wrong one
          shorter; after several wrong ones there are none for a while.
    """

    def __init__(self, most: int = 7) -> None:
        self.nbytes = 0
        self._most = most
        self._trails = Trails(_Trail)

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        most = min(self._most, MOST_ROWS // max(len(items), 1) - 1)
        for item, output in zip(items, outputs, strict=True):
            if most > 0 and output.tokens and item.sequence.request.params.speculation:
                output.draft = self._draft(item.sequence, output.tokens, most)

    def _draft(self, seq: Sequence, new: list[int], most: int) -> list[int]:
        tokens = [*seq.tokens, *new]
        trail = self._trails.of(seq)
        if trail.length != len(tokens):
            trail.follow(tokens)
            trail.draft = trail.guess(tokens, most)
        return list(trail.draft)
