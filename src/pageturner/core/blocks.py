"""BlockPool: which KV block belongs to whom, and which blocks can be found again by content.

Owns the block tables of sequences and the prefix index over one or two stores (store.py). Knows block ids
only: neither the storage behind them, nor what becomes of a request, nor time.

    whole   what attends to every position: blocks stay until their sequence is released
    recent  what sees the last `window` positions only, if anything does: `trim` gives blocks back as soon as
            the next query sees none of their positions; the table keeps the places

The index of `whole` maps (uid of the parent block, tokens of the block) to a block. A uid names one content,
so a key whose parent was evicted can match nothing: the dict is a radix tree at block grain, exact, without
hash collisions. The parent of a first block is (adapter, salt), which keeps those apart. What is pinned
without a salt is everybody's: a sequence with a salt may begin with such blocks, and the parent of its first
own one is (uid of the last of these, salt), so that below them it is alone again. The index of `recent` maps
the uid of the whole block beside it to a block: recent blocks come and go while their prefix stays known; one
whose uid was evicted is found by nobody and ages out.
"""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.core.store import GONE, Store
from pageturner.core.types import Sequence

Parent = int | tuple[int | str, str]


class BlockPool:
    """`num_blocks` blocks of `block_size` (1 to 256) tokens each. ValueError for sizes out of range.

    window  positions, its own included, that a query sees in recent blocks; 0: there are none of these
    recent  how many recent blocks there are, enough for one token and what it sees
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        window: int = 0,
        sliding: int = 0,
    ) -> None:
        if num_blocks < 1 or not 1 <= block_size <= 256:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: at least one, of 1 to 256 tokens")
        self.block_size, self.prefix_caching, self.window = block_size, prefix_caching, window
        if window and sliding < self._span(1):
            raise ValueError(f"a window of {window} tokens needs at least {self._span(1)} blocks")
        self.full, self.sliding = Store(num_blocks), Store(sliding if window else 0)
        self._stores = (self.full, self.sliding) if window else (self.full,)
        self.public: frozenset[int] = (
            frozenset()
        )  # whole blocks pinned without a salt: whoever pins says which

    # -- sizes -----------------------------------------------------------------------------------------------
    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def longest(self, computed: int) -> int:
        """Most tokens that a sequence could compute in one step if it had all blocks to itself."""
        end = self.full.num_blocks
        if self.window:
            end = min(end, self._first(computed) + self.sliding.num_blocks)
        return end * self.block_size - computed

    def together(self, tokens: int, pinned: int = 0) -> int:
        """How many sequences of so many tokens fit side by side, in steps of any size, beside so many pinned
        blocks; one always does."""
        return max(1, (min(store.num_blocks for store in self._stores) - pinned) // self.blocks_for(tokens))

    def share(self, ways: int, pinned: int) -> int:
        """Positions that each of so many sequences can hold side by side, however the others are computed,
        beside so many pinned blocks."""
        blocks = (self.full.num_blocks - pinned) // ways
        if self.window and self.sliding.num_blocks // ways < self._span(1):
            blocks = min(blocks, self.sliding.num_blocks // ways)
        return blocks * self.block_size

    def claims(self, seq: Sequence, tokens: int, step: int, beside: int = 0) -> tuple[int, int]:
        """Whole blocks that the sequence may still take until `tokens` are computed, copies of shared ones
        included, and recent blocks that it may hold at once, at most `step` tokens in one step: shared ones
        are promised to each, because those who share them move on apart. Of one without blocks: beside those
        of its cached prefix that are in use; and with so many others of its search `beside` it, no recent
        ones that these need."""
        matched = [] if seq.blocks else self.match(seq)
        if not seq.blocks and not self.window and self._lends(seq, len(matched)):
            assert seq.source is not None
            matched = seq.source.blocks[: (seq.prompt_len - 1) // self.block_size]
        end, next_ = self.blocks_for(tokens), seq.computed // self.block_size
        copies = len(self.full.shared_places(seq.blocks, next_, end))
        full = max(0, end - len(seq.blocks) - self.full.in_use(matched)) + copies
        if not self.window:
            return full, 0
        first = self._first(seq.computed or len(matched) * self.block_size)
        sliding = self.sliding.num_blocks
        limit = max(sliding - beside * self._span(1), sliding // (beside + 1))
        most = min(end - first, self._span(step), limit)
        return full, max(most, len(seq.sliding) - seq.released)

    def _first(self, position: int) -> int:
        """The first place of which the query at `position` sees anything."""
        return max(0, position + 1 - self.window) // self.block_size if self.window else 0

    def _span(self, step: int) -> int:
        """Most blocks that hold what a step of so many tokens sees: window - 1 + step positions in a row."""
        return self.blocks_for(self.window + step - 2) + 1

    # -- the life of a sequence ------------------------------------------------------------------------------
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks that begin the sequence. Its last token is never among them, because somebody
        must compute its logits; nor is anything from `logits_from` on. With a window, the longest beginning
        behind which all that is still seen is cached."""
        if not self.prefix_caching:
            return []
        tokens, size, limit = seq.tokens, self.block_size, _attachable_at_most(seq)
        blocks = self._public_of(seq, limit) if seq.request.salt else []
        parent: Parent = self._root(seq, blocks)
        usable = run = len(blocks)  # run: the recent blocks in a row that end here
        for start in range(usable * size, limit - size + 1, size):
            block = self.full.index.get((parent, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            parent = self.full.uids[block]
            run = run + 1 if not self.window or parent in self.sliding.index else 0
            if run >= len(blocks) - self._first(start + size):
                usable = len(blocks)
        return blocks[:usable]

    def _public_of(self, seq: Sequence, limit: int) -> list[int]:
        """What everybody may begin with, as far as this sequence does."""
        blocks: list[int] = []
        parent: Parent = (seq.request.adapter, "")
        for end in range(self.block_size, limit + 1, self.block_size):
            block = self.full.index.get((parent, tuple(seq.tokens[end - self.block_size : end])))
            if block is None or block not in self.public:
                break
            blocks.append(block)
            parent = self.full.uids[block]
        return blocks

    def _root(self, seq: Sequence, public: list[int]) -> Parent:
        """The parent of the first block behind those that are everybody's."""
        return (self.full.uids[public[-1]] if public else seq.request.adapter, seq.request.salt)

    def _parent(self, seq: Sequence, place: int) -> Parent:
        if place == seq.public:
            return self._root(seq, seq.blocks[:place])
        return self.full.uids[seq.blocks[place - 1]]

    def _recent_of(self, full: list[int], first: int) -> list[int]:
        """The recent blocks beside the whole ones from place `first` on."""
        return [self.sliding.index[self.full.uids[block]] for block in full[first:]]

    def attach(self, seq: Sequence) -> int:
        """Give a sequence without blocks its longest cached prefix, or the prompt of its source where that
        is longer, by reference. Returns tokens gained."""
        source, seq.blocks = seq.source, self.match(seq)
        if source is not None and self._lends(seq, len(seq.blocks)):
            # All but its last token: logits are wanted once more. Its block is copied when it is written.
            seq.computed = seq.prompt_len - 1
            seq.sealed = min(source.sealed, seq.computed // self.block_size)
            seq.public = min(source.public, seq.sealed)
            seq.blocks = source.blocks[: self.blocks_for(seq.prompt_len)]
        else:
            source, seq.sealed = None, len(seq.blocks)
            seq.public = sum(block in self.public for block in seq.blocks) if seq.request.salt else 0
            seq.computed = seq.sealed * self.block_size
        if self.window:
            seq.released = self._first(seq.computed)
            lent = source and source.sliding[seq.released : len(seq.blocks)]
            seq.sliding = [GONE] * seq.released + (lent or self._recent_of(seq.blocks, seq.released))
        for store, table in self._tables(seq):
            store.share(table)
        return seq.computed

    def attachable(self, seq: Sequence) -> int:
        """Tokens that a sequence without blocks would gain by `attach`."""
        matched = len(self.match(seq))
        return seq.prompt_len - 1 if self._lends(seq, matched) else matched * self.block_size

    def _lends(self, seq: Sequence, matched: int) -> bool:
        """Whether the source of `seq` has more of its prompt than so many cached blocks: all of it, and in
        recent blocks what its last token sees."""
        source, last = seq.source, seq.prompt_len - 1
        if source is None or seq.logits_from is not None or source.computed <= last:
            return False
        if source.public * self.block_size > last:  # its own copy of a block that is everybody's is nobody's
            return False
        return matched * self.block_size < last and source.released <= self._first(last)

    def room(self, seq: Sequence) -> int:
        """The largest n for which `extend(seq, n)` would succeed now."""
        first, end = seq.computed // self.block_size, len(seq.blocks)
        spare = min(store.available - store.lacks(table, first, end) for store, table in self._tables(seq))
        return 0 if spare < 0 else (end + spare) * self.block_size - seq.computed

    def extend(self, seq: Sequence, n: int) -> bool:
        """Make positions computed .. computed+n-1 writable: take blocks, copy shared ones. All or nothing."""
        first, end = seq.computed // self.block_size, self.blocks_for(seq.computed + n)
        alone = n == 1 and end == len(seq.blocks) and self.full.refs[seq.blocks[first]] == 1
        if alone and (not self.window or self.sliding.refs[seq.sliding[first]] == 1):
            return True  # what nearly every call is: the next token of a block of its own
        tables = self._tables(seq)
        if any(store.lacks(table, first, end) > store.available for store, table in tables):
            return False
        for store, table in tables:
            store.write(table, first, end)
        return True

    def seal(self, seq: Sequence) -> None:
        """Make full, computed blocks findable. Where an equal one is findable already, switch to that one."""
        if not self.prefix_caching:
            return
        size = self.block_size
        while (seq.sealed + 1) * size <= seq.computed:
            i = seq.sealed
            key = (self._parent(seq, i), tuple(seq.tokens[i * size : (i + 1) * size]))
            self.full.publish(seq.blocks, i, key)
            if self.window:
                self.sliding.publish(seq.sliding, i, self.full.uids[seq.blocks[i]])
            seq.sealed += 1

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the computed tokens (rejected drafts), and the recent ones of which
        the next token sees nothing. Call it behind `seal`."""
        keep = self.blocks_for(seq.computed)
        if len(seq.blocks) > keep:
            for store, table in self._tables(seq):
                store.cut(table, keep)
        if self.window:
            first = self._first(seq.computed)
            for i in range(seq.released, first):
                self.sliding.drop(seq.sliding[i])
                seq.sliding[i] = GONE
            seq.released = first

    def shares(self, seq: Sequence, other: Sequence) -> int:
        """Tokens in whole blocks with which both prompts begin, as far as `seq` could take them from the
        cache. 0 where nothing would be found there."""
        mine, theirs = seq.request, other.request
        if (
            not self.prefix_caching
            or self.window
            or (mine.adapter, mine.salt) != (theirs.adapter, theirs.salt)
        ):
            return 0
        limit = min(_attachable_at_most(seq), len(other.tokens))
        size, same = self.block_size, 0
        while same + size <= limit and seq.tokens[same : same + size] == other.tokens[same : same + size]:
            same += size
        return same

    def fork(self, src: Sequence, dst: Sequence) -> None:
        """Let `dst`, whose first src.computed tokens are the same, share all computed blocks of `src`."""
        self.trim(src)
        dst.blocks, dst.sliding, dst.released = list(src.blocks), list(src.sliding), src.released
        dst.computed, dst.sealed, dst.public = src.computed, src.sealed, src.public
        for store, table in self._tables(dst):
            store.share(table)

    def keep(self, seq: Sequence) -> None:
        """Take back what nobody could find: all but the sealed blocks. Not for pools with a window."""
        for store, table in self._tables(seq):
            store.cut(table, seq.sealed)
        seq.computed = seq.sealed * self.block_size

    def release(self, seq: Sequence) -> None:
        """Take everything back."""
        for store, table in self._tables(seq):
            store.cut(table, 0)
        seq.computed = seq.sealed = seq.public = seq.released = 0

    def settle(self) -> None:
        """The plan's copies were made: their sources may be given out again."""
        for store in self._stores:
            store.settle()

    def _tables(self, seq: Sequence) -> list[tuple[Store, list[int]]]:
        return list(zip(self._stores, (seq.blocks, seq.sliding), strict=False))

    def stats(self) -> dict[str, float]:
        """Figures of the whole blocks, and with a window those of the recent ones by names with "recent_"."""
        return self.full.stats("") | (self.sliding.stats("recent_") if self.window else {})

    def account(self, sequences: Iterable[Sequence]) -> dict[str, float]:
        """Where the whole blocks of these owners go, in tokens. Walks all tables: not for every step.

        kv_reserved  what their blocks hold, each block once
        kv_used      positions of these that hold KV somebody needs, each once
        kv_wasted    the rest of them: what the last block of a sequence has not needed yet (MISSION: internal
                     waste; external waste is none, since any block serves anybody)
        kv_saved     positions that more than one sequence needs and that are there once: what sharing saves
        """
        size, fill, wanted = self.block_size, dict[int, int](), 0
        for seq in sequences:
            wanted += seq.computed
            for i, block in enumerate(seq.blocks):
                fill[block] = max(fill.get(block, 0), min(size, max(0, seq.computed - i * size)))
        reserved, used = len(fill) * size, sum(fill.values())
        names = ("kv_reserved", "kv_used", "kv_wasted", "kv_saved")
        figures = (reserved, used, reserved - used, wanted - used)
        return {name: float(figure) for name, figure in zip(names, figures, strict=True)}

    # -- audit -----------------------------------------------------------------------------------------------
    def check(self, sequences: Iterable[Sequence]) -> None:
        """AssertionError unless both stores and all tables are what these owners of all blocks imply."""
        owners = list(sequences)
        for seq in owners:
            self._check_table(seq)
        self.full.check(seq.blocks for seq in owners)
        parents = [key[0] for key in self.full.index if isinstance(key, tuple)]
        known = [parent[0] if isinstance(parent, tuple) else parent for parent in parents]
        assert {uid for uid in known if isinstance(uid, int)} <= set(self.full.uids), (
            "a cached block outlived its parent"
        )
        self.sliding.check(seq.sliding for seq in owners)

    def _check_table(self, seq: Sequence) -> None:
        size = self.block_size
        assert len(seq.blocks) * size >= seq.computed, "computed tokens without a block"
        assert seq.sealed * size <= seq.computed, "sealed before computed"
        assert len(set(seq.blocks)) == len(seq.blocks), "a block is twice in one table"
        assert seq.public <= seq.sealed, "public before sealed"
        parent: Parent = (seq.request.adapter, "")
        for i, block in enumerate(seq.blocks[: seq.sealed]):
            parent = self._root(seq, seq.blocks[:i]) if i == seq.public else parent
            key = (parent, tuple(seq.tokens[i * size : (i + 1) * size]))
            assert self.full.keys[block] == key, "a sealed block is findable under another content"
            parent = self.full.uids[block]
        for block in seq.blocks[seq.sealed :]:
            assert self.full.keys[block] is None, "a block that is still written can be found"
        assert len(seq.sliding) == (len(seq.blocks) if self.window else 0), "the tables differ in length"
        assert seq.released == self._first(seq.computed), "a block is kept or given back at the wrong time"
        kept = seq.sliding[seq.released :]
        assert seq.sliding[: seq.released] == [GONE] * seq.released, "a block was not given back"
        assert len(set(kept)) == len(kept), "a recent block is twice in one table"
        for i, block in enumerate(kept, seq.released):
            uid = self.full.uids[seq.blocks[i]] if i < seq.sealed else None
            assert self.sliding.keys[block] == uid, "a recent block is findable beside another content"


def _attachable_at_most(seq: Sequence) -> int:
    """All but its last token, because its logits are wanted; nor anything else whose logits are."""
    last, stop = len(seq.tokens) - 1, seq.logits_from
    return last if stop is None else min(last, stop)
