"""BlockPool: which KV block belongs to whom, and which blocks can be found again by content.

Owns reference counts, the free list, the prefix index and copy-on-write. Knows block ids only: neither the
storage behind them, nor what becomes of a request, nor time.

Who owns a block, at every moment exactly one of:
    used    reference count > 0: in the block tables of that many sequences
    cached  count 0, full, computed and findable: a cache entry at its LRU place, taken when nothing is empty
    empty   count 0, not findable
    held    count 0, but a copy of the plan under way still reads it: not given out before `settle`

The prefix index maps (uid of the parent block, tokens of the block) to a block. A uid names one content and
is never used again, so a key whose parent was evicted can match nothing: the dict is a radix tree at block
grain, exact, without hash collisions. The parent of a first block is (adapter, salt), which keeps those
apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from pageturner.core.types import Sequence

Parent = int | tuple[str, str]
Key = tuple[Parent, tuple[int, ...]]


class BlockPool:
    """`num_blocks` blocks of `block_size` (1 to 256) tokens each. ValueError for sizes out of range."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        if not 1 <= block_size <= 256:
            raise ValueError(f"block size must be 1 to 256 tokens, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.copies: list[tuple[int, int]] = []  # (source, destination) of the plan being made
        self.evictions = 0
        self.copied = 0
        self._refs = [0] * num_blocks
        self._uids = [0] * num_blocks  # of the content; 0: not findable
        self._keys: list[Key | None] = [None] * num_blocks
        self._index: dict[Key, int] = {}
        self._uid = count(1)
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._sources: set[int] = set()
        self._held: list[int] = []

    # -- figures ---------------------------------------------------------------------------------------------
    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def empty(self) -> int:
        return len(self._empty)

    @property
    def shared(self) -> int:
        """Blocks in more than one block table."""
        return sum(refs > 1 for refs in self._refs)

    def unowned(self) -> list[int]:
        """Blocks whose content nobody will ask for again: an engine under test poisons them."""
        return list(self._empty)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    # -- the life of a sequence ------------------------------------------------------------------------------
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks that begin the sequence. Its last token is never among them, because somebody
        must compute its logits; nor is anything from `logits_from` on."""
        if not self.prefix_caching:
            return []
        request, tokens, size = seq.request, seq.tokens, self.block_size
        limit = len(tokens) - 1
        if (stop := seq.logits_from) is not None:
            limit = min(limit, stop)
        blocks: list[int] = []
        parent: Parent = (request.adapter, request.salt)
        for start in range(0, limit - size + 1, size):
            block = self._index.get((parent, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            parent = self._uids[block]
        return blocks

    def in_use(self, blocks: Iterable[int]) -> int:
        """How many of the blocks belong to somebody, so that sharing them takes nothing from the supply."""
        return sum(self._refs[block] > 0 for block in blocks)

    def attach(self, seq: Sequence) -> int:
        """Give a sequence without blocks its longest cached prefix, by reference. Returns tokens gained."""
        seq.blocks = self.match(seq)
        for block in seq.blocks:
            self._share(block)
        seq.sealed = len(seq.blocks)
        seq.computed = seq.sealed * self.block_size
        return seq.computed

    def room(self, seq: Sequence) -> int:
        """The largest n for which `extend(seq, n)` would succeed now."""
        spare = self.available - len(self._shared_tail(seq, len(seq.blocks)))
        return 0 if spare < 0 else (len(seq.blocks) + spare) * self.block_size - seq.computed

    def extend(self, seq: Sequence, n: int) -> bool:
        """Make positions computed .. computed+n-1 writable: take blocks, copy shared ones. All or nothing."""
        blocks, size = seq.blocks, self.block_size
        end = -(-(seq.computed + n) // size)
        missing = max(0, end - len(blocks))
        if not missing and n == 1 and self._refs[blocks[end - 1]] == 1:
            return True  # what nearly every call is: the next token of a block of its own
        shared = self._shared_tail(seq, end)
        if missing + len(shared) > self.available:
            return False
        for i in shared:
            source, blocks[i] = blocks[i], self._take()
            self.copies.append((source, blocks[i]))
            self.copied += 1
            self._sources.add(source)
            self._drop(source)
        for _ in range(missing):
            blocks.append(self._take())
        return True

    def seal(self, seq: Sequence) -> None:
        """Make full, computed blocks findable. Where an equal one is findable already, switch to that one."""
        if not self.prefix_caching:
            return
        size = self.block_size
        while (seq.sealed + 1) * size <= seq.computed:
            i = seq.sealed
            block = seq.blocks[i]
            parent: Parent = self._uids[seq.blocks[i - 1]] if i else (seq.request.adapter, seq.request.salt)
            key = (parent, tuple(seq.tokens[i * size : (i + 1) * size]))
            equal = self._index.get(key)
            if equal is None:
                self._index[key] = block
                self._keys[block] = key
                self._uids[block] = next(self._uid)
            elif equal != block:
                self._share(equal)
                seq.blocks[i] = equal
                self._drop(block)
            seq.sealed += 1

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the computed tokens (rejected drafts)."""
        blocks, keep = seq.blocks, -(-seq.computed // self.block_size)
        while len(blocks) > keep:
            self._drop(blocks.pop())

    def fork(self, src: Sequence, dst: Sequence) -> None:
        """Let `dst`, whose first src.computed tokens are the same, share all computed blocks of `src`."""
        self.trim(src)
        for block in src.blocks:
            self._share(block)
        dst.blocks = list(src.blocks)
        dst.computed = src.computed
        dst.sealed = src.sealed

    def release(self, seq: Sequence) -> None:
        """Take everything back. Tail first, so that in the LRU order children age before their parents."""
        while seq.blocks:
            self._drop(seq.blocks.pop())
        seq.computed = 0
        seq.sealed = 0

    def settle(self) -> None:
        """The plan's copies were made: their sources may be given out again."""
        self.copies = []
        self._sources.clear()
        held, self._held = self._held, []
        for block in held:
            self._retire(block)

    # -- one block -------------------------------------------------------------------------------------------
    def _shared_tail(self, seq: Sequence, end: int) -> list[int]:
        """Places in the block table, from the next position to write up to `end`, that others share."""
        refs, blocks = self._refs, seq.blocks
        first = seq.computed // self.block_size
        return [i for i in range(first, min(end, len(blocks))) if refs[blocks[i]] > 1]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            del self._index[key]
            self._keys[block] = None
            self._uids[block] = 0
            self.evictions += 1
        self._refs[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._sources:
                self._held.append(block)
            else:
                self._retire(block)

    def _retire(self, block: int) -> None:
        if self._keys[block] is None:
            self._empty.append(block)
        else:
            self._cached[block] = None

    # -- audit -----------------------------------------------------------------------------------------------
    def check(self, sequences: Iterable[Sequence]) -> None:
        """AssertionError unless counts, lists and index are exactly what these owners of all blocks imply."""
        refs = [0] * self.num_blocks
        for seq in sequences:
            self._check_table(seq)
            for block in seq.blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        unused = sorted(block for block, n in enumerate(refs) if n == 0)
        listed = sorted([*self._empty, *self._cached, *self._held])
        assert unused == listed, "unused blocks differ from the free lists"
        assert all(self._keys[block] is not None for block in self._cached), "a cached block cannot be found"
        assert all(self._keys[block] is None for block in self._empty), "an empty block can be found"
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._index, "index and keys differ"
        parents = {key[0] for key in keyed if isinstance(key[0], int)}
        assert parents <= set(self._uids), "a cached block outlived its parent"
        uids = [uid for uid in self._uids if uid]
        assert len(set(uids)) == len(uids) == len(keyed), "a uid is missing or names two blocks"

    def _check_table(self, seq: Sequence) -> None:
        size = self.block_size
        assert len(seq.blocks) * size >= seq.computed, "computed tokens without a block"
        assert seq.sealed * size <= seq.computed, "sealed before computed"
        assert len(set(seq.blocks)) == len(seq.blocks), "a block is twice in one table"
        parent: Parent = (seq.request.adapter, seq.request.salt)
        for i, block in enumerate(seq.blocks[: seq.sealed]):
            key = (parent, tuple(seq.tokens[i * size : (i + 1) * size]))
            assert self._keys[block] == key, "a sealed block is findable under another content"
            parent = self._uids[block]
        for block in seq.blocks[seq.sealed :]:
            assert self._keys[block] is None, "a block that is still written can be found"
