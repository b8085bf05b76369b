"""BlockPool: which KV block belongs to whom, and which blocks can be found again by content.

Owns the block tables of sequences and the prefix index over the stores of its kinds of pages
(store.py). Knows block ids only: neither the storage behind them, nor what becomes of a request,
nor time.

    full     blocks of the layers that attend to every position: they stay until their sequence is
             released
    sliding  blocks of the layers with a sliding window, if there are any: these see the last
             `window` positions only. `trim` gives blocks back as soon as the next query sees none
             of their positions

A full, computed block is findable by its key (block_keys.py): the index is a radix tree at block
grain, flattened into a dict. Blocks pinned without a salt are public: a salted sequence may begin
with them; behind them its keys are salted again. A sliding block has the key of the full block
beside it.

The positions of a sequence, and who may write into their blocks:
    [0, cached * size)                shared with the index: findable, never written again
    [cached * size, computed)         its own, or shared with its forks: copied before the first
                                      write
    [computed, len(blocks) * size)    granted in the plans under way, still to be written
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from pageturner.block_keys import block_key, chain_keys, root_key, salted_key
from pageturner.scheduler.store import GONE, Pages, Store, Table
from pageturner.scheduler.types import Sequence


class BlockPool:
    """`num_blocks` blocks of `block_size` (1 to 256) tokens each. ValueError for sizes out of
    range.

    window   positions, its own included, that a query sees in sliding blocks; 0: there are none of
             these
    sliding  how many sliding blocks there are, enough for one token and what it sees
    model    names the weights that KV is computed with, for the keys of blocks
    kinds    the kinds of pages, the full blocks first
    public   full blocks that are pinned without a salt; pinned: how many blocks no request can get
             because ended requests keep them, or will. Both are set by PinnedPrefixes
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        window: int = 0,
        sliding: int = 0,
        model: str = "",
    ) -> None:
        if num_blocks < 1 or not 1 <= block_size <= 256:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens: at least one, of 1 to 256 tokens"
            )
        self.block_size, self.prefix_caching, self.window = block_size, prefix_caching, window
        self.full, self.sliding = Store(num_blocks), Store(sliding if window else 0)
        self.kinds = [Pages(self.full, attrgetter("blocks"), block_size)]
        if window:
            self.kinds.append(Pages(self.sliding, attrgetter("sliding"), block_size, window))
            if sliding < (least := self.kinds[1].most_seen(1)):
                raise ValueError(f"a window of {window} tokens needs at least {least} blocks")
        self._windowed = self.kinds[1:]
        self._model = model
        self.public, self.pinned = frozenset[int](), 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def longest_step(self, computed: int) -> int:
        """Most tokens that a sequence could compute in one step if it had all blocks to itself."""
        blocks = min(kind.first_seen(computed) + kind.store.num_blocks for kind in self.kinds)
        return blocks * self.block_size - computed

    def side_by_side(self, tokens: int) -> int:
        """Return how many sequences of so many tokens fit side by side, in steps of any size,
        beside what is pinned; one always does."""
        blocks = min(kind.store.num_blocks for kind in self.kinds) - self.pinned
        return max(1, blocks // self.blocks_for(tokens))

    def share(self, ways: int) -> int:
        """Positions that each of so many sequences can hold side by side, however the others are
        computed, beside what is pinned."""
        blocks = (self.full.num_blocks - self.pinned) // ways
        for kind in self._windowed:
            if kind.store.num_blocks // ways < kind.most_seen(1):
                blocks = min(blocks, kind.store.num_blocks // ways)
        return blocks * self.block_size

    def blocks_needed(
        self, seq: Sequence, tokens: int, step: int, beside: int = 0
    ) -> tuple[int, int]:
        """Full blocks that the sequence may still take until `tokens` are computed, copies of
        shared ones included, and sliding blocks that it may hold at once, at most `step` tokens in
        one step: shared ones are promised to each, because sequences that share them move on apart.
        One without blocks has those of its cached prefix that are in use, and leaves so many others
        of its search `beside` it what they need."""
        matched = [] if seq.blocks else self.match(seq)
        if not seq.blocks and not self.window and self._takes_from_source(seq, len(matched)):
            assert seq.source is not None
            matched = seq.source.blocks[: (seq.prompt_len - 1) // self.block_size]
        end, next_ = self.blocks_for(tokens), seq.computed // self.block_size
        copies = len(self.full.shared_places(seq.blocks, next_, end))
        in_use = sum(self.full.refs[block] > 0 for block in matched)
        full = max(0, end - len(seq.blocks) - in_use) + copies
        if not self.window:
            return full, 0
        kind = self.kinds[1]
        first = kind.first_seen(seq.computed or len(matched) * self.block_size)
        sliding = self.sliding.num_blocks
        limit = max(sliding - beside * kind.most_seen(1), sliding // (beside + 1))
        most = min(end - first, kind.most_seen(step), limit)
        return full, max(most, len(seq.sliding) - seq.sliding.released)

    def _public_keys(self, seq: Sequence) -> Iterator[bytes]:
        """Yield the keys that its blocks would have if they were public."""
        known = seq.block_keys[: seq.keys_public]
        return chain_keys(
            root_key(self._model, seq.request.adapter), seq.tokens, self.block_size, known
        )

    def _key(self, seq: Sequence, place: int, public: int) -> bytes:
        """Return the key of its block at `place`, behind so many public ones. The sequence keeps
        the key."""
        keys, request, size = seq.block_keys, seq.request, self.block_size
        if seq.keys_public != public or not keys:
            keys[:] = islice(self._public_keys(seq), public)
            seq.keys_public = public
        while len(keys) <= place:
            before = keys[-1] if keys else root_key(self._model, request.adapter, request.salt)
            if keys and len(keys) == public:
                before = salted_key(before, request.salt)
            keys.append(block_key(before, seq.tokens[len(keys) * size : (len(keys) + 1) * size]))
        return keys[place]

    # -- the life of a sequence --------------------------------------------------------------------
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks that begin the sequence. Its last token is never among them, because a
        step must compute its logits; nor is anything from `logits_from` on. With a window, the
        longest beginning behind which all that is still seen is cached."""
        if not self.prefix_caching:
            return []
        size, limit = self.block_size, _attachable_at_most(seq)
        blocks = self._public_of(seq, limit) if seq.request.salt else []
        public = usable = run = len(blocks)  # run: the sliding blocks in a row that end here
        for place in range(public, limit // size):
            key = self._key(seq, place, public)
            block = self.full.index.get(key)
            if block is None:
                break
            blocks.append(block)
            if self.window:
                run = run + 1 if key in self.sliding.index else 0
            if not self.window or run >= len(blocks) - self.kinds[1].first_seen((place + 1) * size):
                usable = len(blocks)
        return blocks[:usable]

    def _public_of(self, seq: Sequence, limit: int) -> list[int]:
        """Return the public blocks that this sequence begins with."""
        blocks: list[int] = []
        for key in islice(
            self._public_keys(seq), max(0, limit // self.block_size) if self.public else 0
        ):
            block = self.full.index.get(key)
            if block is None or block not in self.public:
                break
            blocks.append(block)
        return blocks

    def attach(self, seq: Sequence) -> int:
        """Give a sequence without blocks its longest cached prefix, or the prompt of its source
        where that is longer, by reference. Returns tokens gained."""
        self._fetch(seq)
        source, seq.blocks = seq.source, self.match(seq)
        if source is not None and self._takes_from_source(seq, len(seq.blocks)):
            # All but its last token: logits are wanted once more. Its block is copied when it is
            # written.
            seq.computed = seq.prompt_len - 1
            seq.num_cached_blocks = min(source.num_cached_blocks, seq.computed // self.block_size)
            seq.public = min(source.public, seq.num_cached_blocks)
            seq.blocks = source.blocks[: self.blocks_for(seq.prompt_len)]
        else:
            source, seq.num_cached_blocks = None, len(seq.blocks)
            seq.public = self._count_public(seq, seq.blocks)
            seq.computed = seq.num_cached_blocks * self.block_size
        if self.window:
            released = self.kinds[1].first_seen(seq.computed)
            beside = [
                source.sliding[i] if source else self.sliding.index[self._key(seq, i, 0)]
                for i in range(released, len(seq.blocks))
            ]
            seq.sliding = Table([GONE] * released + beside, released)
        for store, table in self._tables(seq):
            store.share(table)
        return seq.computed

    def _count_public(self, seq: Sequence, blocks: list[int]) -> int:
        """Return how many of the blocks a salted sequence has from what is public."""
        return sum(block in self.public for block in blocks) if seq.request.salt else 0

    def _fetch(self, seq: Sequence) -> None:
        """Ask slower memory for what comes behind its cached prefix, all of which is held
        meanwhile."""
        fetch, blocks = self.full.on_miss, self.match(seq) if self.full.on_miss else []
        public = self._count_public(seq, blocks)
        self.full.share(blocks)
        while fetch and (len(blocks) + 1) * self.block_size <= _attachable_at_most(seq):
            if (block := fetch(self._key(seq, len(blocks), public))) is None:
                break
            self.full.share([block])
            blocks.append(block)
        self.full.truncate(blocks, 0)

    def attachable(self, seq: Sequence) -> int:
        """Tokens that a sequence without blocks would gain by `attach`."""
        matched = len(self.match(seq))
        if self._takes_from_source(seq, matched):
            return seq.prompt_len - 1
        return matched * self.block_size

    def _takes_from_source(self, seq: Sequence, matched: int) -> bool:
        """Return whether its source has all of its prompt, and so more than so many cached blocks
        hold."""
        source, last = seq.source, seq.prompt_len - 1
        if source is None or seq.logits_from is not None or source.computed <= last:
            return False
        if source.public * self.block_size > last:  # a copy of a public block is nobody's
            return False
        return matched * self.block_size < last and all(
            kind.table(source).released <= kind.first_seen(last) for kind in self._windowed
        )

    def room(self, seq: Sequence) -> int:
        """The largest n for which `extend(seq, n)` would succeed now."""
        start, end = seq.computed + seq.inflight, len(seq.blocks)
        first = start // self.block_size
        spare = min(
            store.available - store.num_new_blocks(table, first, end)
            for store, table in self._tables(seq)
        )
        return 0 if spare < 0 else (end + spare) * self.block_size - start

    def extend(self, seq: Sequence, n: int) -> bool:
        """Make the next n positions writable: take blocks, copy shared ones. All or nothing."""
        start = seq.computed + seq.inflight
        first, end = start // self.block_size, -(-(start + n) // self.block_size)
        alone = n == 1 and end == len(seq.blocks) and self.full.refs[seq.blocks[first]] == 1
        if alone and (not self.window or self.sliding.refs[seq.sliding[first]] == 1):
            return True  # what nearly every call is: the next token of a block of its own
        tables = self._tables(seq)
        if any(
            store.num_new_blocks(table, first, end) > store.available for store, table in tables
        ):
            return False
        for store, table in tables:
            store.write(table, first, end)
        return True

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Make full, computed blocks findable. Where an equal one is findable already, switch to
        that one."""
        if not self.prefix_caching:
            return
        for place in range(seq.num_cached_blocks, seq.computed // self.block_size):
            key = self._key(seq, place, seq.public)
            self.full.publish(seq.blocks, place, key)
            if self.window:
                self.sliding.publish(seq.sliding, place, key)
            seq.num_cached_blocks = place + 1

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the tokens that are computed or under way (rejected drafts),
        and the sliding ones of which the next token sees nothing. Call it behind
        `cache_full_blocks`."""
        keep = -(-(seq.computed + seq.inflight) // self.block_size)
        if len(seq.blocks) > keep:
            for store, table in self._tables(seq):
                store.truncate(table, keep)
        for kind in self._windowed:
            kind.store.give_back(kind.table(seq), kind.first_seen(seq.computed))

    def common_prefix(self, seq: Sequence, other: Sequence) -> int:
        """Tokens in whole blocks with which both begin, as far as `seq` could take them from the
        cache."""
        mine, theirs = seq.request, other.request
        apart = (mine.adapter, mine.salt) != (theirs.adapter, theirs.salt)
        if not self.prefix_caching or self.window or apart:
            return 0
        limit = min(_attachable_at_most(seq), len(other.tokens))
        size, same = self.block_size, 0
        while (
            same + size <= limit
            and seq.tokens[same : same + size] == other.tokens[same : same + size]
        ):
            same += size
        return same

    def fork(self, src: Sequence, dst: Sequence) -> None:
        """Let `dst`, whose first src.computed tokens are the same, share all computed blocks of
        `src`."""
        self.trim(src)
        dst.blocks = list(src.blocks)
        dst.sliding = Table(src.sliding, src.sliding.released)
        dst.computed, dst.num_cached_blocks, dst.public = (
            src.computed,
            src.num_cached_blocks,
            src.public,
        )
        dst.block_keys, dst.keys_public = src.block_keys[: src.num_cached_blocks], src.keys_public
        for store, table in self._tables(dst):
            store.share(table)

    def release(self, seq: Sequence) -> None:
        """Take everything back."""
        for store, table in self._tables(seq):
            store.truncate(table, 0)
        seq.sliding.released = 0
        seq.computed = seq.inflight = seq.num_cached_blocks = seq.public = 0

    def begin(self) -> list[list[tuple[int, int]]]:
        """The plan that was being made begins: what it copies, of each kind of pages."""
        return [kind.store.begin() for kind in self.kinds]

    def release_held(self, under_way: bool = False) -> None:
        """A plan is done: what was held for it may be given out again. under_way: another one has
        begun."""
        for kind in self.kinds:
            kind.store.release_held(under_way)

    def _tables(self, seq: Sequence) -> list[tuple[Store, list[int]]]:
        return [(kind.store, kind.table(seq)) for kind in self.kinds]


def _attachable_at_most(seq: Sequence) -> int:
    """All but its last token, because its logits are wanted; nor anything else whose logits are."""
    last, stop = len(seq.tokens) - 1, seq.logits_from
    return last if stop is None else min(last, stop)
