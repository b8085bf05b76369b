"""Store: equal blocks with reference counts, some of which can be found again by content.

Owns counts, free lists, index and copies. Must not know what a key says or whose tables it is
handed.

A block is, at every moment, exactly one of:
    used    reference count > 0: in the block tables of that many sequences
    cached  count 0, full, computed and findable: a cache entry at its LRU place, taken when nothing
            is empty
    empty   count 0, not findable
    held    count 0, but a plan under way may still read or write it: until `release_held`
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

GONE = -1  # in a block table: the place of a block that was given back


class Table(list[int]):
    """The blocks of a sequence in one store, by place. The first `released` places are GONE: their
    blocks were given back, because no later query sees them."""

    __slots__ = ("released",)

    def __init__(self, blocks: Iterable[int] = (), released: int = 0) -> None:
        super().__init__(blocks)
        self.released = released


class Store:
    """`num_blocks` blocks, all empty at first. A table is a list of block ids, one for each place.

    held      the held blocks; under_way: whether a plan that has begun may still use what is
              dropped now
    on_publish  called with the key and the block when one becomes findable: its bytes stay until
                on_evict
    on_evict  called with the same when a cached block is about to be overwritten
    on_miss   asked for a key that a sequence needs and no block has: it may make one findable and
              return it; below: tells whether it could
    cached    the cached blocks, least recently released first; oldest: says which is overwritten
              next. Both can be replaced, by something that knows more of them than when they were
              released
    useless   what is about to be overwritten need not be kept elsewhere
    evictions, copied  cached blocks that were overwritten, and blocks that were copied, since the
                       beginning
    sharing   version number: goes up when a block becomes or stops being shared; tells a stale
              Sequence.estimate
    shared, extra_refs  blocks in more than one table, and what all references are more than one
                        each
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.copies: list[tuple[int, int]] = []  # (source, destination) of the plan being made
        self.on_publish: Callable[[bytes, int], None] = lambda key, block: None
        self.on_evict: Callable[[bytes, int], None] = lambda key, block: None
        self.on_miss: Callable[[bytes], int | None] | None = None
        self.below: Callable[[bytes], bool] = lambda key: False
        self.useless = False
        self.sharing = self.evictions = self.copied = self.shared = self.extra_refs = 0
        self.refs, self.index = [0] * num_blocks, dict[bytes, int]()
        self.keys: list[bytes | None] = [None] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self.cached: MutableMapping[int, None] = OrderedDict()
        self.oldest: Callable[[], int] = lambda: next(iter(self.cached))
        self._sources, self.held, self.under_way = set[int](), dict[int, None](), False

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._empty) + len(self.cached)

    def shared_places(self, table: list[int], first: int, end: int) -> list[int]:
        """Places first .. end-1 of the table, as far as it goes, whose blocks others have too."""
        refs = self.refs
        return [i for i in range(first, min(end, len(table))) if refs[table[i]] > 1]

    def num_new_blocks(self, table: list[int], first: int, end: int, since: int = 0) -> int:
        """Blocks that `write` would take."""
        new = max(0, end - max(len(table), since))
        return new + len(self.shared_places(table, first, end))

    def write(self, table: list[int], first: int, end: int, since: int = 0) -> None:
        """Make places first .. end-1 writable: copy shared blocks, take new ones. New places before
        `since` stay GONE."""
        for i in self.shared_places(table, first, end):
            source, table[i] = table[i], self._take()
            self.copies.append((source, table[i]))
            self.copied += 1
            self._sources.add(source)
            self.sharing += 1
            self.drop(source)
        while len(table) < end:
            table.append(GONE if len(table) < since else self._take())

    def fill(self, table: list[int], place: int) -> None:
        """Give a place that is GONE a block of its own."""
        table[place] = self._take()

    def publish(self, table: list[int], place: int, key: bytes) -> None:
        """Make a block findable. Where an equal one is findable already, switch to that one."""
        block = table[place]
        equal = self.index.get(key)
        if equal is None:
            self.index[key], self.keys[block] = block, key
            self.on_publish(key, block)
        elif equal != block:
            self.share([equal])
            table[place] = equal
            self.drop(block)

    def share(self, table: list[int]) -> None:
        """One more table has the same blocks."""
        for block in table:
            if block != GONE:
                refs = self.refs[block]
                if refs == 0:
                    del (self.held if block in self.held else self.cached)[block]
                self.sharing += refs == 1
                self.shared += refs == 1
                self.extra_refs += refs > 0
                self.refs[block] = refs + 1

    def give_back(self, table: Table, first: int) -> None:
        """Give back the places before `first`, of which no later query sees anything."""
        for i in range(table.released, first):
            self.drop(table[i])
            table[i] = GONE
        table.released = first

    def truncate(self, table: list[int], keep: int) -> None:
        """Give back all but the first `keep` places, tail first: children age before their
        parents."""
        while len(table) > keep:
            self.drop(table.pop())

    def begin(self) -> list[tuple[int, int]]:
        """The plan that was being made begins: what it copies."""
        copies, self.copies, self.under_way = self.copies, [], True
        return copies

    def release_held(self, under_way: bool) -> None:
        """A plan is done: what was held for it may be given out again. under_way: another one has
        begun."""
        self._sources.clear()
        self.copies, held, self.held, self.under_way = [], self.held, {}, False
        for block in held:
            self._retire(block)
        self.under_way = under_way

    def drop(self, block: int) -> None:
        """One table less has it."""
        if block != GONE:
            refs = self.refs[block] = self.refs[block] - 1
            self.sharing += refs == 1
            self.shared -= refs == 1
            self.extra_refs -= refs > 0
            if refs == 0:
                self._retire(block)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block = self.oldest()
            del self.cached[block]
            key, self.keys[block] = self.keys[block], None
            assert key is not None
            self.on_evict(key, block)
            del self.index[key]
            self.evictions += 1
        self.refs[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if self.under_way or block in self._sources:
            self.held[block] = None
        elif self.keys[block] is None:
            self._empty.append(block)
        else:
            self.cached[block] = None


@dataclass(frozen=True, slots=True)
class Pages:
    """One kind of pages of a pool: a store, and how the positions of a sequence lie in its table.

    table   returns the table of a sequence
    size    tokens of one place
    window  positions, its own included, that a query sees in these pages; 0: all before it
    sparse  of the new places of a step only those must have a block at which the sequence may stand
            behind it: the last one, and with drafts those from the first draft on
    before  a place holds what is before its first position (a recurrent state), and is written
            once, by the step that computes the position before it
    """

    store: Store
    table: Callable[[Any], Any]
    size: int
    window: int = 0
    sparse: bool = False
    before: bool = False

    def places(self, tokens: int) -> int:
        """The places that so many tokens have."""
        return -(-(tokens + self.before) // self.size)

    def written(self, seq: Any, start: int, n: int) -> tuple[int, int, int]:
        """The places that a step of n tokens from position `start` on writes: the first, the end,
        and the first of the new ones that must have a block."""
        first = start // self.size + self.before
        if not self.sparse:
            return first, self.places(start + n), first
        return first, self.places(start + n), max(first, self._last(seq, start + n))

    def _last(self, seq: Any, end: int) -> int:
        """The last place of a step that ends there, or of its tokens that are no drafts."""
        return self.places(min(end, len(seq.tokens)) if seq.draft else end) - 1

    def alone(self, seq: Any, position: int) -> bool:
        """Return whether the sequence has what `position` is written into for itself."""
        table = self.table(seq)
        first, end, _ = self.written(seq, position, 1)
        return end <= len(table) and (first >= end or self.store.refs[table[first]] == 1)

    def room(self, seq: Any, start: int) -> int:
        """Return how many positions from `start` on could be made writable now."""
        table = self.table(seq)
        end = len(table)
        spare = self.store.available - self.store.num_new_blocks(
            table, start // self.size + self.before, end
        )
        if self.sparse and spare > 0:
            if not seq.draft:
                return sys.maxsize
            end = max(end, self._last(seq, sys.maxsize))
        return 0 if spare < 0 else (end + spare) * self.size - self.before - start

    def first_seen(self, position: int) -> int:
        """The first place of which the query at `position` sees anything."""
        return max(0, position + 1 - self.window) // self.size if self.window else 0

    def most_seen(self, step: int) -> int:
        """Most places that hold what a step of so many tokens sees: window - 1 + step positions in
        a row, or two of a sparse kind: the last one, and the one before it."""
        return 2 if self.sparse else -(-(self.window + step - 2) // self.size) + 1
