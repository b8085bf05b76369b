"""Snapshots: which states of recurrent layers stay behind sequences, and which of them goes first.

A state takes the memory of some thousand tokens of KV, and a prompt can be taken up only where one
stands: so few are kept, at places where another prompt is likely to part from this one. Owns both
rules. Must not know what a state holds, nor how large it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from pageturner.policies.session_claims import Claims
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Sequence

LEAST = 128  # tokens between two snapshots that are worth having both
SHARE = 16  # they are a sixteenth of what is before them apart, or more
FINER = 8  # times as many regular ones are kept while there is plenty of room
BRANCH_USES = 2  # a place where a prompt parted from another one was asked for once already


@dataclass(slots=True)
class Snapshot:
    """A findable state. gain: tokens that it saves, as far as the snapshot before it does not;
    passed: its sequence went on, and nothing speaks for the place."""

    key: bytes | None
    gain: int
    uses: int
    passed: bool = False


class Snapshots(MutableMapping[int, None]):
    """The cached states of a pool, in the place of `Store.cached` and `Store.oldest`.

    A step keeps the states at multiples of `every`, where its prompt parts from others that are
    cached, and before the end of the prompt, and others while they cost nothing: all of them where
    there is a slot for each that the KV cache has room for (LFM2). When there is no
    room, states go whose KV was overwritten; then those that sequences passed without a reason to
    keep them; then the one that saves the fewest tokens, times its uses, where all others gain in
    worth whenever one goes (greedy dual size frequency, Cherkasova 1998).
    """

    def __init__(self, pool: BlockPool, every: int) -> None:
        self._pool, self._store = pool, pool.states
        self._every = -(-max(every, 1) // pool.grain) * pool.grain
        room = self._store.num_blocks * pool.grain
        self._all = room >= pool.full.num_blocks * pool.block_size
        self._known: dict[int, Snapshot] = {}
        self._ends: Container[bytes] = ()
        self._passed: OrderedDict[int, None] = OrderedDict()  # those without KV stand first
        # slot -> worth, a number that rises, slot; the heap has these, and others that are no more
        self._kept: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._floor, self._number = 0.0, 0  # the worth of the last that went, and the last number
        self._store.cached, self._store.oldest = self, self._oldest
        pool.wanted, pool.on_state, pool.full.on_evict = self.wanted, self._found, self._kv_gone

    def wanted(self, seq: Sequence, start: int, end: int) -> Iterable[int]:
        """The positions behind `start`, up to `end`, whose states are to be kept; more of them
        while half of the memory is empty, which go as those do that were passed."""
        grain = self._pool.grain
        if self._all:
            return range((start // grain + 1) * grain, end + 1, grain)
        found = self._reasons(seq, start, end)
        empty = self._store.available - len(self)
        if 2 * empty > self._store.num_blocks:
            apart = max(self._every // FINER // grain, 1) * grain
            found.update(range((start // apart + 1) * apart, end + 1, apart))
        return sorted(found)

    def _reasons(self, seq: Sequence, start: int, end: int) -> set[int]:
        """The positions that have a reason of their own."""
        found = set(range((start // self._every + 1) * self._every, end + 1, self._every))
        found = {position for position in found if position % self._apart(position) == 0}
        last = (seq.prompt_len - 1) // self._pool.grain * self._pool.grain
        for position, apart in ((seq.branch, max(LEAST, seq.branch // SHARE)), (last, LEAST)):
            if start < position <= end and position - self._before(seq, position) >= apart:
                found.add(position)
        return found

    def _apart(self, position: int) -> int:
        """The distance of the regular snapshots there: twice as large whenever they get too
        close."""
        apart = self._every
        while apart * SHARE < position:
            apart *= 2
        return apart

    def _before(self, seq: Sequence, position: int) -> int:
        """The last place before a position that has a reason to be kept, or 0."""
        apart = self._apart(position - 1)
        regular = (position - 1) // apart * apart
        return max(regular, seq.branch if seq.branch < position else 0)

    def _found(self, seq: Sequence, position: int, slot: int) -> None:
        """A state becomes findable, or is one that was. The one before it in its sequence, if there
        was no reason for it, has been passed."""
        places = range(position // self._pool.chunk - 1, seq.states.released - 1, -1)
        last = next((seq.states[i] for i in places if seq.states[i] != GONE), GONE)
        before = self._known.get(last)
        if before is not None and not before.gain:
            before.passed = True
        key, known = self._store.keys[slot], self._known.get(slot)
        if known is None or known.key != key:
            uses = BRANCH_USES if position == seq.branch else 1
            known = self._known[slot] = Snapshot(key, 0, uses)
        if position in self._reasons(seq, position - 1, position):
            known.gain = position - self._before(seq, position)

    def keep_for(self, claims: Claims, give_up: Callable[[], None]) -> None:
        """The states where conversations go on are overwritten when all others were, and they were
        given up. give_up: cuts a conversation."""
        self._ends = claims.ends
        self._give_up = give_up
        claims.on_end = self._claim_changed

    def _claim_changed(self, key: bytes) -> None:
        slot = self._store.index.get(key, GONE)
        if self._remove(slot):
            self[slot] = None

    def _kv_gone(self, key: bytes, block: int) -> None:
        """The KV that ends where a state stands is overwritten: the state is the next to go."""
        slot = self._store.index.get(key, GONE)
        if self._remove(slot):
            self._passed[slot] = None
            self._passed.move_to_end(slot, last=False)

    def _remove(self, slot: int) -> bool:
        found = slot in self
        self._passed.pop(slot, None)
        self._kept.pop(slot, None)
        return found

    def _oldest(self) -> int:
        """The state that is overwritten next. There must be a cached one."""
        self._store.useless = False
        while not self._passed:
            while self._kept.get(self._heap[0][2]) != self._heap[0]:
                heappop(self._heap)
            worth, _, slot = self._heap[0]
            if worth < inf:
                self._floor = max(self._floor, worth)
                return slot
            self._give_up()
        slot = next(iter(self._passed))
        known = self._known.get(slot)
        self._store.useless = not self._all and known is not None and known.passed
        return slot

    # -- as a mapping, which is all that a store sees of it ----------------------------------------
    def __setitem__(self, slot: int, value: None) -> None:
        known, key = self._known.get(slot), self._store.keys[slot]
        if known is not None and known.key != key:  # it came from elsewhere, and was asked for
            known = self._known[slot] = Snapshot(key, self._every, BRANCH_USES)
        has_kv = key in self._pool.full.index
        worth: float = self._pool.grain  # of one that was not computed by this process, too
        if has_kv and key in self._ends:
            worth = inf
        elif not has_kv or (known is not None and known.passed):
            self._passed[slot] = None
            self._passed.move_to_end(slot, last=has_kv)
            return
        elif known is not None:
            worth = known.uses * max(known.gain, worth)
        self._number += 1
        self._kept[slot] = self._floor + worth, self._number, slot
        heappush(self._heap, self._kept[slot])
        if len(self._heap) > 2 * len(self._kept) + LEAST:
            self._heap = list(self._kept.values())
            heapify(self._heap)

    def __delitem__(self, slot: int) -> None:
        if not self._remove(slot):
            raise KeyError(slot)
        known = self._known.get(slot)
        if known is not None:
            known.uses += 1
            known.passed = False

    def __getitem__(self, slot: int) -> None:
        if slot not in self._passed and slot not in self._kept:
            raise KeyError(slot)

    def __iter__(self) -> Iterator[int]:
        yield from self._passed
        yield from self._kept

    def __len__(self) -> int:
        return len(self._passed) + len(self._kept)
