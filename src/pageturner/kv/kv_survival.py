"""KV memory that outlives the engine process: a memory file, with a directory of the sealed blocks
in it.

Owns the layout of that file. The supervisor makes it, empty, and hands it to one engine process
after the other; the one before is dead when the next one maps it.

    head      how many blocks there are, and a digest of that and of all else that it depends on
    records   one for each block of each store: key, checksum, stamp; a checksum of 0: nothing is
              there
    storage   of each store, on a border of huge pages

A process may die between any two instructions, so the file is true at each of them: a record is
written when its block was sealed, behind the step that computed it, from when on nobody writes into
the block, and its checksum is written last. It is struck out before the block is given out again.
The checksum is of the bytes, begun with the key: whatever else may have happened to a block is
found by it, and the block computed again. Must not know requests, how a key is made or who keeps
the file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import astuple, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.executor.kv_memory import KVSizes
from pageturner.kernels.base import KV, KVSpec
from pageturner.kernels.recurrent import RecurrentCache
from pageturner.kv import kv_file
from pageturner.kv.kv_block_file import RECORD
from pageturner.kv.store_hooks import add_block_hooks
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.listener import Listener, StepReport
from pageturner.scheduler.store import Store

MAGIC = b"ptkv\0\0\0\3"  # the last byte: version of the layout
HEAD = struct.Struct("<8s32s5Q")  # magic, digest, blocks, window, sliding blocks, states, tails
RECORDS_AT = 4096


class SurvivingKV:
    """The file as one engine process uses it: `begin`, then storage for each store, then `attach`.

    identity  32 bytes that name everything on which the bytes of KV and their layout depend
    sizes     of the process before this one, whose blocks are there; None: nothing can be taken
              back
    taken     blocks that were taken back
    listener  to be told of committed steps
    """

    def __init__(self, fd: int, identity: bytes, threads: int = 1) -> None:
        self._fd, self._identity, self._threads = fd, identity, threads
        self._storage: list[KV] = []
        self._states: NDArray[np.uint8] | None = None
        self._directories: list[Directory] = []
        self.taken = 0
        self.listener = Listener(committed=self._note, stats=self._stats)
        self.sizes = self._read_sizes()

    def _read_sizes(self) -> KVSizes | None:
        head = os.pread(self._fd, HEAD.size, 0)
        if len(head) < HEAD.size:
            return None
        sizes = KVSizes(*HEAD.unpack(head)[2:])
        return sizes if head == self._head(sizes) else None

    def _head(self, sizes: KVSizes) -> bytes:
        counts = struct.pack("<5Q", *astuple(sizes))
        return MAGIC + hashlib.blake2b(self._identity + counts, digest_size=32).digest() + counts

    def begin(self, sizes: KVSizes) -> Callable[[KVSpec], KV]:
        """Lay the file out for so many blocks; others than `sizes` give up everything that is
        there. Returns what gives storage for one store after the other. EngineFault('kv_memory')
        when it cannot be mapped.
        """
        if sizes != self.sizes:
            os.ftruncate(self._fd, 0)
            self.sizes = None
        count = sizes.blocks + sizes.sliding + sizes.states
        self._end = (
            -(-(RECORDS_AT + count * RECORD.itemsize) // kv_file.HUGE_PAGE) * kv_file.HUGE_PAGE
        )
        self._grow()
        self._map = mmap.mmap(self._fd, self._end)
        self._records = np.frombuffer(self._map, RECORD, count, RECORDS_AT)
        self._map[: HEAD.size] = self._head(sizes)
        return self._alloc

    def _alloc(self, spec: KVSpec) -> KV:
        offset = self._end
        self._end += kv_file.room(spec)
        self._grow()
        self._storage.append(kv_file.alloc(spec, self._fd, offset))
        return self._storage[-1]

    def place(self, cache: RecurrentCache) -> RecurrentCache:
        """The same with states that outlive this process. Tails are computed again."""
        shape = cache.states.shape
        offset, size = self._end, shape[0] * shape[1]
        self._end += -(-size // kv_file.HUGE_PAGE) * kv_file.HUGE_PAGE
        self._grow()
        try:
            memory = mmap.mmap(self._fd, size, offset=offset)
        except (OSError, ValueError) as error:
            raise EngineFault(
                "kv_memory",
                f"the system refuses to map {size / 1e6:.0f} MB of states: ask for less of it",
            ) from error
        self._states = np.frombuffer(memory, np.uint8).reshape(shape)
        return replace(cache, states=self._states)

    def _grow(self) -> None:
        if os.fstat(self._fd).st_size < self._end:
            os.ftruncate(self._fd, self._end)

    def attach(self, pool: BlockPool) -> int:
        """Make findable in a new pool what verifies, and from here on write down what it seals.
        Returns how many blocks were taken back."""
        first, stores = 0, [kind.store for kind in pool.kinds if not kind.sparse]
        none = [None] * (
            len(stores) - len(self._storage)
        )  # whole blocks, if all layers have a window
        bytes_of: list[kv_file.StoredBytes] = [
            kv_file.KVBytes(kv, self._threads) for kv in (*none, *self._storage)
        ]
        if self._states is not None:
            stores.append(pool.states)
            bytes_of.append(kv_file.StateBytes(self._states))
        for store, stored in zip(stores, bytes_of, strict=True):
            records = self._records[first : first + store.num_blocks]
            first += store.num_blocks
            directory = Directory(store, stored, records)
            self.taken += directory.take_back()
            self._directories.append(directory)
        return self.taken

    def _note(self, report: StepReport) -> None:
        for directory in self._directories:
            directory.note()

    def _stats(self) -> dict[str, float]:
        """Blocks that were taken back from the process before; seconds that checksums took in
        steps."""
        seconds = sum(directory.seconds for directory in self._directories)
        return {"kv_blocks_taken_back": self.taken, "kv_checksum_seconds": seconds}


class Directory:
    """The records of one store. seconds: what it took to write them, checksums included."""

    def __init__(
        self, store: Store, stored: kv_file.StoredBytes, records: NDArray[np.void]
    ) -> None:
        self._store, self._stored = store, stored
        self._keys, self._sums, self._stamps = (records[name] for name in RECORD.names or ())
        self._new_blocks: dict[int, bytes] = {}  # blocks of the step under way
        self._stamp = 0
        self.seconds = 0.0

    def take_back(self) -> int:
        """Make findable whatever verifies; strike out the rest. Returns how many blocks are taken
        back."""
        found = np.flatnonzero(self._sums).astype(np.int32)
        keys = self._keys[found].tobytes()
        right = self._stored.checksums(found, seeds_of(keys)) == self._sums[found]
        # What was sealed last is overwritten first: a chain of blocks loses its end, never its
        # beginning. Of states the last ones are those that unfinished sequences go on from.
        newest = sorted(found[right].tolist(), key=lambda block: -int(self._stamps[block]))
        block_of = {self._keys[block].tobytes(): block for block in newest}
        kept = {block: key for key, block in block_of.items()}
        self._stamp = len(kept)
        # no checksum is of them: they begin anew
        self._stamps[[*kept]] = np.arange(self._stamp, 0, -1)
        self._sums[np.setdiff1d(found, [*kept])] = 0
        if kept:
            in_order = kept
            if not self._stored.chained:
                in_order = dict(reversed(kept.items()))
            adopt(self._store, in_order)
            self._stored.take_huge_pages(max(kept))
        add_block_hooks(self._store, self._published, self._strike_out)
        return len(kept)

    def _published(self, key: bytes, block: int) -> None:
        self._new_blocks[block] = key

    def _strike_out(self, key: bytes, block: int) -> None:
        self._sums[block] = 0
        self._new_blocks.pop(block, None)

    def note(self) -> None:
        """Write down what was sealed since the last call."""
        if not self._new_blocks:
            return
        begin = perf_counter()
        blocks = np.fromiter(self._new_blocks, np.int32, len(self._new_blocks))
        keys = b"".join(self._new_blocks.values())
        self._new_blocks.clear()
        sums = self._stored.checksums(blocks, seeds_of(keys))
        self._keys[blocks] = np.frombuffer(keys, self._keys.dtype)
        self._stamps[blocks] = np.arange(
            self._stamp + 1, self._stamp + 1 + len(blocks), dtype=np.uint64
        )
        self._stamp += len(blocks)
        self._sums[blocks] = sums  # last: from here on the records hold
        self.seconds += perf_counter() - begin
        # Not counted: private memory is put on huge pages too, where it is first touched.
        self._stored.take_huge_pages(int(blocks.max()) + 1)


def seeds_of(keys: bytes) -> kv_file.U64:
    """Return the seed of each block's checksum: half of its key, so that it holds for no other
    key."""
    return np.ascontiguousarray(np.frombuffer(keys, np.uint64)[::2])


def adopt(store: Store, kept: dict[int, bytes]) -> None:
    """Make blocks of a new store findable, whose bytes are there already, as if they had been used
    and released. kept: the key of each, no two the same; the first is the first to be
    overwritten."""
    table: list[int] = []
    store.write(table, 0, store.num_blocks)
    place = {block: i for i, block in enumerate(table)}
    for block, key in kept.items():
        store.publish(table, place[block], key)
    for block in sorted(place.keys() - kept.keys(), reverse=True):
        store.drop(block)  # the lowest is the first to be taken
    for block in kept:
        store.drop(block)
