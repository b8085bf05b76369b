"""Store: equal blocks with reference counts, some of which can be found again by content.

Owns counts, free lists, index and copies. Must not know what a key says or whose tables it is handed.

Who owns a block, at every moment exactly one of:
    used    reference count > 0: in the block tables of that many sequences
    cached  count 0, full, computed and findable: a cache entry at its LRU place, taken when nothing is empty
    empty   count 0, not findable
    held    count 0, but a copy of the plan under way still reads it: not given out before `settle`
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from itertools import count

GONE = -1  # in a block table: the place of a block that was given back


class Store:
    """`num_blocks` blocks, all empty at first. A table is a list of block ids, one for each place."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.copies: list[tuple[int, int]] = []  # (source, destination) of the plan being made
        self._evictions = self._copied = 0
        self.refs = [0] * num_blocks
        self.uids = [0] * num_blocks  # names the content, and is never used again; 0: not findable
        self.index: dict[Hashable, int] = {}
        self.keys: list[Hashable | None] = [None] * num_blocks
        self._uid = count(1)
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._sources: set[int] = set()
        self._held: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._empty) + len(self._cached)

    def stats(self, prefix: str) -> dict[str, float]:
        """Gauges and counters. Shared blocks are in more than one table."""
        used, shared = self.num_blocks - self.available, sum(refs > 1 for refs in self.refs)
        names = ("blocks_used", "blocks_cached", "blocks_shared", "blocks_total", "evictions", "copies")
        figures = (used, len(self._cached), shared, self.num_blocks, self._evictions, self._copied)
        return {prefix + name: float(figure) for name, figure in zip(names, figures, strict=True)}

    def unowned(self) -> list[int]:
        """Blocks whose content nobody will ask for again: an engine under test poisons them."""
        return list(self._empty)

    def in_use(self, blocks: Iterable[int]) -> int:
        """How many of the blocks belong to somebody, so that sharing them takes nothing from the supply."""
        return sum(self.refs[block] > 0 for block in blocks)

    # -- tables ----------------------------------------------------------------------------------------------
    def shared_places(self, table: list[int], first: int, end: int) -> list[int]:
        """Places first .. end-1 of the table, as far as it goes, whose blocks others have too."""
        refs = self.refs
        return [i for i in range(first, min(end, len(table))) if refs[table[i]] > 1]

    def lacks(self, table: list[int], first: int, end: int) -> int:
        """Blocks that `write` would take."""
        return max(0, end - len(table)) + len(self.shared_places(table, first, end))

    def write(self, table: list[int], first: int, end: int) -> None:
        """Make places first .. end-1 writable: copy shared blocks, take new ones."""
        for i in self.shared_places(table, first, end):
            source, table[i] = table[i], self._take()
            self.copies.append((source, table[i]))
            self._copied += 1
            self._sources.add(source)
            self.drop(source)
        while len(table) < end:
            table.append(self._take())

    def publish(self, table: list[int], place: int, key: Hashable) -> None:
        """Make a block findable. Where an equal one is findable already, switch to that one."""
        block = table[place]
        equal = self.index.get(key)
        if equal is None:
            self.index[key] = block
            self.keys[block] = key
            self.uids[block] = next(self._uid)
        elif equal != block:
            self.share([equal])
            table[place] = equal
            self.drop(block)

    def share(self, table: list[int]) -> None:
        """One more table has the same blocks."""
        for block in table:
            if block != GONE:
                if self.refs[block] == 0:
                    del self._cached[block]
                self.refs[block] += 1

    def cut(self, table: list[int], keep: int) -> None:
        """Give back all but the first `keep` places, tail first: children age before their parents."""
        while len(table) > keep:
            self.drop(table.pop())

    def settle(self) -> None:
        """The plan's copies were made: their sources may be given out again."""
        self.copies = []
        self._sources.clear()
        held, self._held = self._held, []
        for block in held:
            self._retire(block)

    # -- one block -------------------------------------------------------------------------------------------
    def drop(self, block: int) -> None:
        """One table less has it."""
        if block != GONE:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._retire(block)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self.index[self.keys[block]]
            self.keys[block] = None
            self.uids[block] = 0
            self._evictions += 1
        self.refs[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if block in self._sources:
            self._held.append(block)
        elif self.keys[block] is None:
            self._empty.append(block)
        else:
            self._cached[block] = None

    def check(self, tables: Iterable[list[int]]) -> None:
        """AssertionError unless counts, lists and index are what these tables, all there are, imply."""
        owners = Counter(block for table in tables for block in table if block != GONE)
        refs = [owners[block] for block in range(self.num_blocks)]
        assert refs == self.refs, "reference counts differ from the block tables"
        unused = sorted(block for block, n in enumerate(self.refs) if n == 0)
        listed = sorted([*self._empty, *self._cached, *self._held])
        assert unused == listed, "unused blocks differ from the free lists"
        assert all(self.keys[block] is not None for block in self._cached), "a cached block cannot be found"
        assert all(self.keys[block] is None for block in self._empty), "an empty block can be found"
        keyed = {key: block for block, key in enumerate(self.keys) if key is not None}
        assert keyed == self.index, "index and keys differ"
        uids = [uid for uid in self.uids if uid]
        assert len(set(uids)) == len(uids) == len(keyed), "a uid is missing or names two blocks"
