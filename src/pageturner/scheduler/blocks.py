"""BlockPool: which KV block belongs to whom, and which blocks can be found again by content.

Owns the block tables of sequences and the prefix index over the stores of its kinds of pages
(store.py). Knows block ids only: neither the storage behind them, nor what becomes of a request,
nor time.

    full     blocks of the layers that attend to every position: they stay until their sequence is
             released
    sliding  blocks of the layers with a sliding window, if there are any: these see the last
             `window` positions only. `trim` gives blocks back as soon as the next query sees none
             of their positions
    states   slots of the states of recurrent layers, before some chunks of CHUNK positions: written
             once, by the step that computes the last row before the chunk
    tail     blocks of the rows of one unfinished chunk in recurrent layers; never findable

A full, computed block is findable by its key (block_keys.py): the index is a radix tree at block
grain, flattened into a dict. Blocks pinned without a salt are public: a salted sequence may begin
with them; behind them its keys are salted again. A sliding block has the key of the full block
beside it, a state that of the full block that ends where it stands.

The positions of a sequence, and who may write into their blocks:
    [0, cached * size)                shared with the index: findable, never written again
    [cached * size, computed)         its own, or shared with its forks: copied before the first
                                      write
    [computed, len(blocks) * size)    granted in the plans under way, still to be written
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from pageturner.block_keys import block_key, chain_keys, root_key, salted_key
from pageturner.scheduler.store import GONE, Pages, Store
from pageturner.scheduler.types import Sequence

CHUNK = 32  # positions between two states: part of what recurrent layers compute, and no setting


class BlockPool:
    """`num_blocks` blocks of `block_size` (1 to 256) tokens each. ValueError for sizes out of
    range.

    window   positions, its own included, that a query sees in sliding blocks; 0: there are none of
             these
    sliding  how many sliding blocks there are, enough for one token and what it sees
    states   slots for recurrent states, and as many blocks for tails as `tails` says; 0: there are
             no recurrent layers
    model    names the weights that KV is computed with, for the keys of blocks
    kinds    the kinds of pages, the full blocks first
    plain    all that there is are full blocks
    wanted   tells which positions within a step (sequence, its start, its end) get a state that
             stays, as far as there is room: multiples of `grain`, which is where a state can be
             found again
    state_hits, state_missed_tokens  how often a sequence began at a state, and tokens of whose KV it
             could not take, since no state stands behind them
    on_state  called with a sequence, a position and the slot, when a state becomes findable
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
        states: int = 0,
        tails: int = 0,
        chunk: int = CHUNK,
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
        self.states, self.tails, self.chunk = Store(states), Store(tails), chunk
        if states:
            self.kinds.append(Pages(self.tails, attrgetter("tail"), chunk, 1, sparse=True))
            before = Pages(self.states, attrgetter("states"), chunk, 1, sparse=True, before=True)
            self.kinds.append(before)
            if min(states, tails) < 2:
                raise ValueError(f"{states} states and {tails} tails: at least two of each")
        self._windowed, self._sparse = self.kinds[1:], [k for k in self.kinds if k.sparse]
        self._dense = [kind for kind in self.kinds if not kind.sparse]
        self.plain, self.grain = len(self.kinds) == 1, math.lcm(block_size, chunk)
        self.state_hits = self.state_missed_tokens = 0
        self.wanted: Callable[[Sequence, int, int], Iterable[int]] = lambda seq, start, end: ()
        self.on_state: Callable[[Sequence, int, int], None] = lambda seq, position, slot: None
        self._model = model
        self.public, self.pinned = frozenset[int](), 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_size)

    def longest_step(self, computed: int) -> int:
        """Most tokens that a sequence could compute in one step if it had all blocks to itself."""
        blocks = min(kind.first_seen(computed) + kind.store.num_blocks for kind in self._dense)
        return blocks * self.block_size - computed

    def side_by_side(self, tokens: int) -> int:
        """Return how many sequences of so many tokens fit side by side, in steps of any size,
        beside what is pinned; one always does."""
        blocks = min(kind.store.num_blocks for kind in self._dense) - self.pinned
        most = [kind.store.num_blocks // 2 for kind in self._sparse]
        return max(1, min([blocks // self.blocks_for(tokens), *most]))

    def share(self, ways: int) -> int:
        """Positions that each of so many sequences can hold side by side, however the others are
        computed, beside what is pinned."""
        blocks = (self.full.num_blocks - self.pinned) // ways
        for kind in self._windowed:
            if kind.store.num_blocks // ways < kind.most_seen(1):
                blocks = 0 if kind.sparse else min(blocks, kind.store.num_blocks // ways)
        return blocks * self.block_size

    def has_states_for(self, joining: int, running: int, granted: int) -> bool:
        """Return whether so many more sequences find states and tails beside those that run, of
        which so many have been granted what they take in this step: each has one, and takes another
        in a step and gives one back behind it."""
        now = 2 * joining + running - granted
        ever = 2 * (joining + running)
        stores = [kind.store for kind in self._sparse]
        return all(now <= store.available and ever <= store.num_blocks for store in stores)

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

    def keys(self, seq: Sequence) -> Iterator[bytes]:
        """Yield the keys of the blocks with which a sequence without blocks may begin."""
        limit = _attachable_at_most(seq)
        public = len(self._public_of(seq, limit))
        for place in range(limit // self.block_size):
            yield self._key(seq, place, public)

    # -- the life of a sequence --------------------------------------------------------------------
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks that begin the sequence. Its last token is never among them, because a
        step must compute its logits; nor is anything from `logits_from` on. With a window, the
        longest beginning behind which all that is still seen is cached."""
        blocks, usable = self._search(seq)
        return blocks[:usable]

    def _search(self, seq: Sequence) -> tuple[list[int], int]:
        """The full blocks that begin the sequence, and how many of them it can take."""
        if not self.prefix_caching:
            return [], 0
        size, limit = self.block_size, _attachable_at_most(seq)
        blocks = self._public_of(seq, limit)
        public = usable = run = len(blocks)  # run: the sliding blocks in a row that end here
        for place in range(usable, limit // size):
            key = self._key(seq, place, public)
            block = self.full.index.get(key)
            if block is None:
                break
            blocks.append(block)
            if self.window:
                run = run + 1 if key in self.sliding.index else 0
            end = (place + 1) * size
            seen = not self.window or run >= len(blocks) - self.kinds[1].first_seen(end)
            if seen and (not self._sparse or (end % self.chunk == 0 and key in self.states.index)):
                usable = len(blocks)
        return blocks, usable

    def _public_of(self, seq: Sequence, limit: int) -> list[int]:
        """Return the public blocks that this sequence begins with, as far as states stand."""
        blocks: list[int] = []
        usable = 0
        count = max(0, limit // self.block_size) if self.public and seq.request.salt else 0
        for key in islice(self._public_keys(seq), count):
            block = self.full.index.get(key)
            if block is None or block not in self.public:
                break
            blocks.append(block)
            if not self._sparse or key in self.states.index:
                usable = len(blocks)
        return blocks[:usable]

    def attach(self, seq: Sequence) -> int:
        """Give a sequence without blocks its longest cached prefix, or the prompt of its source
        where that is longer, by reference. Returns tokens gained."""
        self._fetch(seq)
        source = seq.source
        found, usable = self._search(seq)
        seq.blocks = found[:usable]
        if source is not None and self._takes_from_source(seq, len(seq.blocks)):
            # All but its last token: logits are wanted once more. Its block is copied when it is
            # written.
            seq.computed = seq.prompt_len - 1
            seq.num_cached_blocks = min(source.num_cached_blocks, seq.computed // self.block_size)
            seq.public = min(source.public, seq.num_cached_blocks)
            seq.blocks = source.blocks[: self.blocks_for(seq.prompt_len)]
        else:
            source, seq.num_cached_blocks = None, len(seq.blocks)
            seq.public = (
                sum(block in self.public for block in seq.blocks) if seq.request.salt else 0
            )
            seq.computed = seq.num_cached_blocks * self.block_size
        seq.branch = len(found) * self.block_size // self.grain * self.grain
        if self._sparse and source is None:
            self.state_hits += seq.computed > 0
            self.state_missed_tokens += (len(found) - usable) * self.block_size
        for kind in self._windowed:
            table, released = kind.table(seq), kind.first_seen(seq.computed)
            end = kind.places(seq.computed) if kind.sparse else len(seq.blocks)
            beside = [self._beside(kind, seq, source, i) for i in range(released, end)]
            table[:] = [GONE] * released + beside
            table.released = released
        for store, table in self._tables(seq):
            store.share(table)
        return seq.computed

    def _beside(self, kind: Pages, seq: Sequence, source: Sequence | None, place: int) -> int:
        """The block of another kind that goes with the full blocks which a sequence attaches."""
        if source is not None:
            return int(kind.table(source)[place])
        if kind.before:  # before the first position there is nothing
            place = place * self.chunk // self.block_size - 1
        return kind.store.index[self._key(seq, place, seq.public)] if place >= 0 else GONE

    def _fetch(self, seq: Sequence) -> None:
        """Ask slower memory for what comes behind its cached prefix, all of which is held
        meanwhile; of recurrent layers for the state at the end of it, too."""
        fetch = self.full.on_miss
        if fetch is None:
            return
        blocks, limit, size = self.match(seq), _attachable_at_most(seq), self.block_size
        if self._sparse:
            limit = self._with_state_below(seq)
        self.full.share(blocks)
        for key in islice(self.keys(seq), len(blocks), limit // size):
            block = self.full.index.get(key)
            if block is None and (block := fetch(key)) is None:
                break
            self.full.share([block])
            blocks.append(block)
        if self._sparse and self.states.on_miss is not None and 0 < limit == len(blocks) * size:
            key = seq.block_keys[len(blocks) - 1]
            if key not in self.states.index:
                self.states.on_miss(key)
        self.full.truncate(blocks, 0)

    def _with_state_below(self, seq: Sequence) -> int:
        """The most tokens whose KV is here or in slower memory, and the state behind them, too."""
        most, (full, states) = 0, (self.full, self.states)
        for count, key in enumerate(self.keys(seq), 1):
            if key not in full.index and not full.below(key):
                break
            if key in states.index or states.below(key):
                most = count * self.block_size
        return most

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
        start = seq.computed + seq.inflight
        return min(kind.room(seq, start) for kind in self.kinds)

    def extend(self, seq: Sequence, n: int) -> bool:
        """Make the next n positions writable: take blocks, copy shared ones. All or nothing."""
        start = seq.computed + seq.inflight
        first, end = start // self.block_size, -(-(start + n) // self.block_size)
        alone = n == 1 and end == len(seq.blocks) and self.full.refs[seq.blocks[first]] == 1
        if alone and (self.plain or all(kind.alone(seq, start) for kind in self._windowed)):
            return True  # what nearly every call is: the next token of a block of its own
        written = [
            (kind.store, kind.table(seq), kind.written(seq, start, n)) for kind in self.kinds
        ]
        if any(
            store.num_new_blocks(table, *places) > store.available
            for store, table, places in written
        ):
            return False
        for store, table, places in written:
            store.write(table, *places)
        # of those that it passes it keeps some, and leaves as many as there are tails for others
        for position in self.wanted(seq, start, start + n) if self._sparse else ():
            place = position // self.chunk
            if seq.states[place] == GONE and self.states.available > self.tails.available:
                self.states.fill(seq.states, place)
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
            end = (place + 1) * self.block_size
            if self._sparse and end % self.chunk == 0 and seq.states[end // self.chunk] != GONE:
                self.states.publish(seq.states, end // self.chunk, key)
                self.on_state(seq, end, seq.states[end // self.chunk])

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the tokens that are computed or under way (rejected drafts),
        and the sliding ones of which the next token sees nothing. Call it behind
        `cache_full_blocks`."""
        keep = -(-(seq.computed + seq.inflight) // self.block_size)
        if len(seq.blocks) > keep or self._sparse:
            for kind in self.kinds:
                kind.store.truncate(kind.table(seq), kind.places(seq.computed + seq.inflight))
        for kind in self._windowed:
            kind.store.give_back(kind.table(seq), kind.first_seen(seq.computed))

    def common_prefix(self, seq: Sequence, other: Sequence) -> int:
        """Tokens in whole blocks with which both begin, as far as `seq` could take them from the
        cache: with recurrent layers up to the last state that `other` keeps of them."""
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
        return max(self.wanted(other, 0, same), default=0) if self._sparse else same

    def fork(self, src: Sequence, dst: Sequence) -> None:
        """Let `dst`, whose first src.computed tokens are the same, share all computed blocks of
        `src`."""
        self.trim(src)
        dst.blocks = list(src.blocks)
        for kind in self._windowed:
            theirs, mine = kind.table(src), kind.table(dst)
            mine[:] = theirs
            mine.released = theirs.released
        dst.computed = src.computed
        dst.num_cached_blocks = src.num_cached_blocks
        dst.public = src.public
        dst.block_keys, dst.keys_public = src.block_keys[: src.num_cached_blocks], src.keys_public
        for store, table in self._tables(dst):
            store.share(table)

    def findable(self, keys: list[bytes]) -> int:
        """Return how many of these first blocks of a sequence, which are cached, another one can
        begin with: as many as end at a state that is there, where layers are recurrent."""
        count = len(keys)
        while self._sparse and count and keys[count - 1] not in self.states.index:
            count -= 1
        return count

    def keys_of(self, blocks: list[int]) -> list[bytes]:
        """The keys of full blocks that are cached."""
        return [key for block in blocks if (key := self.full.keys[block]) is not None]

    def release(self, seq: Sequence) -> None:
        """Take everything back."""
        for store, table in self._tables(seq):
            store.truncate(table, 0)
        for kind in self._windowed:
            kind.table(seq).released = 0
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
