"""Slower memory for KV and recurrent states: blocks that leave the device go down to host memory
and a file, and come up again.

Owns what goes down and when, what comes up, and the threads that use the disk. All else happens in
the thread that steps, which copies memory and never waits for a disk:

    sealed     a block is handed to the thread that writes the file, as far as that keeps up
    evicted    it goes to host memory, and from there to the file; without host memory straight to
               the file
    missed     the scheduler asks for a block that the device has not: from host memory, or from the
               file if the system has it in memory (its page cache)
    submitted  a request whose blocks lie in the file waits in the anteroom while a thread reads
               them, so that the system has them in memory. It waits for PATIENCE seconds at most

A state is as large as many blocks, and most are passed by their sequences soon: so states go down
when they are evicted, and of a request's states the last one alone is read.

Whatever goes wrong costs the block, which is computed again, and is counted; a file that cannot be
written is left alone for a while. Must not know the scheduler, the layout of the file or what is in
a block.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from pageturner import logs
from pageturner.kv.kv_block_file import BlockFile, Bytes, Read, sum_of
from pageturner.kv.kv_transfer import Transfer
from pageturner.kv.store_hooks import add_block_hooks
from pageturner.request import Request
from pageturner.scheduler.listener import StepReport

STAGED_BYTES = 64 << 20  # of blocks on their way to the file
PATIENCE = 10.0  # seconds for which a request waits for the disk
PAUSE = 10.0  # seconds for which a file is left alone that could not be written
LOOK_EVERY = 0.25  # seconds between two looks at what another engine has written
FLUSH = 1.5  # seconds that an engine which ends takes to write what is in memory alone
MAX_WARM = 65_536  # keys that are remembered as read into memory


class HostMemory:
    """Copies of blocks, the least recently used first to go. `most` of them, each `nbytes`."""

    def __init__(self, most: int, nbytes: int) -> None:
        self.most = most
        self.errors = 0
        # one more, so that a block can come up as one goes down
        self._rows = np.zeros((most + 1, nbytes), np.uint8)
        self._free = list(range(most, -1, -1))
        self._at: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # key -> row, checksum

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def put(
        self, key: bytes, read: Callable[[Bytes], None], goes: Callable[[bytes, Bytes], None]
    ) -> None:
        """Take in a block. goes: told of one that has to leave for it, while its bytes are still
        there."""
        if self.most < 1:
            return
        if key in self._at:
            self._at.move_to_end(key)
            return
        if len(self._at) >= self.most:
            old, (row, _) = self._at.popitem(last=False)
            goes(old, self._rows[row])
            self._free.append(row)
        row = self._free.pop()
        read(self._rows[row])
        self._at[key] = (row, sum_of(self._rows[row], key))

    def newest(self) -> list[tuple[bytes, Bytes]]:
        """Keys and bytes of all blocks, those that were used last first."""
        return [(key, self._rows[row]) for key, (row, _) in reversed(self._at.items())]

    @contextlib.contextmanager
    def taken(self, key: bytes) -> Iterator[Bytes | None]:
        """The bytes of a block, which is not there any more; None where it was not, or is not what
        was written (`errors`). They are good until the end of the `with`."""
        place = self._at.pop(key, None)
        if place is None:
            yield None
            return
        row, checksum = place
        try:
            if sum_of(self._rows[row], key) == checksum:
                yield self._rows[row]
            else:
                self.errors += 1
                yield None
        finally:
            self._free.append(row)

    def forget(self) -> None:
        self._free += [row for row, _ in self._at.values()]
        self._at.clear()


@dataclass(slots=True)
class KVTicket:
    """A request that waits until its blocks were read from the file: what the anteroom asks of a
    future."""

    work: Future[None]
    until: float

    def done(self) -> bool:
        return self.work.done() or time.monotonic() > self.until

    def cancel(self) -> bool:
        return self.work.cancel()

    def result(self) -> None:
        """Whatever came of it, the request can run."""


class KVTiers:
    """The tiers of one store, behind its hooks.

    host       bytes of host memory, 0 for none
    file       where there is one
    """

    def __init__(self, transfer: Transfer, host: int, file: BlockFile | None) -> None:
        self._store, self._transfer = transfer.store, transfer
        nbytes = transfer.nbytes
        self.host = HostMemory(host // nbytes, nbytes)
        self.file = file
        self.counts: Counter[str] = Counter()
        self._new_blocks: dict[bytes, int] = {}  # in the step under way
        self._forgetting = False
        self._scratch = np.zeros(nbytes, np.uint8)
        self._warm: OrderedDict[bytes, None] = OrderedDict()
        self._bad: set[bytes] = set()
        self._paused_until = 0.0
        self._closing = False
        self._age = 0  # goes up when everything is forgotten
        staged = max(2, min(1024, STAGED_BYTES // nbytes)) if file is not None else 0
        self._staging = np.empty((staged, nbytes), np.uint8)
        self._places: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(staged):
            self._places.put(place)
        # key, place, age
        self._down: queue.SimpleQueue[tuple[bytes, int, int] | None] = queue.SimpleQueue()
        self._on_way: dict[
            bytes, int
        ] = {}  # key -> place; only the thread that steps fills a place
        self._loaders = ThreadPoolExecutor(1, "kv-load") if file is not None else None
        self._writer = threading.Thread(target=self._write, name="kv-file", daemon=True)
        add_block_hooks(self._store, self._published, self._evict)
        self._store.on_miss, self._store.below = self._fetch, self._below
        if file is not None:
            self._writer.start()
            atexit.register(_close, weakref.ref(self))

    # -- down --------------------------------------------------------------------------------------
    def _published(self, key: bytes, block: int) -> None:
        if self.file is not None and self._transfer.chained:
            self._new_blocks[key] = block

    def committed(self, report: StepReport) -> None:
        """Stage the blocks that the step completed for the file, while half of the places are left
        for what is evicted."""
        for key, block in self._new_blocks.items():
            if self._places.qsize() <= len(self._staging) // 2:
                break  # it goes when it is evicted
            self._stage(key, partial(self._transfer.read, block))
        self._new_blocks.clear()

    def _evict(self, key: bytes, block: int) -> None:
        self._new_blocks.pop(key, None)
        if self._forgetting or self._store.useless:
            return
        if self.host.most:
            self.host.put(key, partial(self._transfer.read, block), self._leave_host)
            self.counts["host_stored"] += 1
        else:
            self._stage(key, partial(self._transfer.read, block))

    def _leave_host(self, key: bytes, row: Bytes) -> None:
        self._stage(key, partial(_copy, row))

    def _stage(self, key: bytes, read: Callable[[Bytes], None]) -> bool:
        """Hand a block to the thread that writes; False if that has too much to do already."""
        file = self.file
        if file is None or not file.writes or key in self._on_way:
            return True
        if key in file and key not in self._bad:
            file.touch(key)
            return True
        try:
            if time.monotonic() < self._paused_until:
                raise queue.Empty
            place = self._places.get_nowait()
        except queue.Empty:
            self.counts["file_skipped"] += 1
            return False
        read(self._staging[place])
        self._on_way[key] = place
        self._down.put((key, place, self._age))
        return True

    def _write(self) -> None:
        """The thread that writes; while another engine does, the one that looks what there is."""
        file = self.file
        assert file is not None
        while True:
            try:
                item = self._down.get(timeout=None if file.writes else LOOK_EVERY)
            except queue.Empty:
                with contextlib.suppress(OSError):
                    file.refresh()
                continue
            if item is None:
                return
            key, place, age = item
            try:
                if place < 0:
                    file.strike_out(key)
                    self._bad.discard(key)
                elif age == self._age:
                    file.write(key, self._staging[place])
                    self.counts["file_stored"] += 1
            except OSError as error:
                self._failed(
                    f"cannot write ({error.strerror}): it is left alone for {PAUSE:.0f} s at a time"
                )
            finally:
                if place >= 0:
                    self._on_way.pop(key, None)
                    self._places.put(place)

    def _failed(self, why: str) -> None:
        self.counts["file_errors"] += 1
        if not self._paused_until and self.file is not None:
            logs.say(f"--kv-file {self.file.path}: {why}; nothing is lost", "warning")
        self._paused_until = time.monotonic() + PAUSE

    # -- up ----------------------------------------------------------------------------------------
    def _fetch(self, key: bytes) -> int | None:
        """Bring the block of this key to the device, if that takes no disk."""
        found = self._from_host(key)
        if found is None:
            found = self._from_file(key)
        if found is None:
            found = self._from_staging(key)
        self.counts["tier_misses"] += found is None
        return found

    def _below(self, key: bytes) -> bool:
        return key in self.host or key in self._on_way or bool(self.file and key in self.file)

    def _from_host(self, key: bytes) -> int | None:
        if not self._store.available:
            return None
        with self.host.taken(key) as data:
            return None if data is None else self._bring_up(key, data, "host_hits")

    def _from_file(self, key: bytes) -> int | None:
        file = self.file
        if file is None or key not in file or key in self._bad or not self._store.available:
            return None
        read = file.read(key, self._scratch, wait=file.waits and key in self._warm)
        if read is Read.BAD:
            self._strike(key)
        self.counts["file_late"] += read is Read.WAIT
        if read is not Read.HIT:
            return None
        return self._bring_up(key, self._scratch, "file_hits")

    def _from_staging(self, key: bytes) -> int | None:
        """Bring up a block that is on its way to the file, or just there: its place is nobody
        else's until the next is filled."""
        place = self._on_way.get(key)
        if place is None:
            return None
        self._scratch[:] = self._staging[place]
        return self._bring_up(key, self._scratch, "file_hits")

    def _bring_up(self, key: bytes, data: Bytes, hits: str) -> int | None:
        found = self._transfer.place(key, data)
        self.counts[hits] += found is not None
        return found

    def _strike(self, key: bytes) -> None:
        """A block that is not what was written: nobody is to find it again."""
        if key not in self._bad:
            self._bad.add(key)
            self.counts["file_errors"] += 1
            self._down.put((key, -1, 0))

    def ticket(self, request: Request) -> KVTicket | None:
        """Return what a request has to wait for; None: what is of use to it lies in memory, or
        nowhere."""
        file = self.file
        if file is None or self._loaders is None or not file.count:
            return None
        chained = self._transfer.chained
        wanted: list[bytes] = []
        for key in self._transfer.request_keys(request):
            here = key in self._store.index or key in self.host or key in self._on_way
            if not here and (key not in file or key in self._bad):
                if chained:
                    break
                continue
            if not chained:
                wanted.clear()
            if not here:
                wanted.append(key)
        if not wanted:
            return None
        until = time.monotonic() + PATIENCE
        return KVTicket(self._loaders.submit(self._load, wanted, until), until)

    def _load(self, keys: list[bytes], until: float) -> None:
        """Have the system read these blocks into memory, and look at them."""
        file, out = self.file, np.empty(self._transfer.nbytes, np.uint8)
        assert file is not None
        for key in keys:
            if self._closing or time.monotonic() > until:
                return
            read = file.read(key, out, wait=True)
            if read is Read.ABSENT:
                return
            if read is Read.BAD:
                # and go on: what lies behind it may be as bad, and is to be computed again
                self._strike(key)
            else:
                self._warm[key] = None
        while len(self._warm) > MAX_WARM:
            self._warm.popitem(last=False)

    # -- the rest ----------------------------------------------------------------------------------
    def forget(self, others: Callable[[], None]) -> None:
        """Find nothing again that is only kept because somebody might. others: has the device
        forget it."""
        self._forgetting = True
        try:
            others()
        finally:
            self._forgetting = False
        self._age += 1
        self.host.forget()
        if self.file is not None:
            try:
                self.file.forget()
            except OSError as error:
                self._failed(f"cannot be emptied ({error.strerror})")

    def stats(self) -> dict[str, float]:
        """Return by tier the blocks and bytes that are there, found, stored, lost; errors.
        file_state: 0 none, 1 it is read, 2 it is written too."""
        file = self.file
        figures = {name: self.counts[name] for name in COUNTED}
        figures["host_errors"] = self.host.errors
        figures["file_state"] = 0 if file is None else 1 + file.writes
        figures["block_bytes"] = self._transfer.nbytes
        there = {"host": len(self.host), "file": file.count if file is not None else 0}
        for tier, blocks in there.items():
            figures[f"{tier}_blocks"] = blocks
            figures[f"{tier}_bytes"] = blocks * self._transfer.nbytes
        return {f"{self._transfer.name}_{name}": figure for name, figure in figures.items()}

    def close(self) -> None:
        """Write what is in memory alone, for FLUSH seconds at most, and leave the file to
        others."""
        file, self._closing = self.file, True
        if file is None or self._loaders is None:
            return
        until = time.monotonic() + FLUSH
        self._loaders.shutdown(wait=True, cancel_futures=True)
        if file.writes:
            self._flush(until)
        self._down.put(None)
        self._writer.join(max(0.1, until - time.monotonic()))
        if not self._writer.is_alive():
            file.close()
        self.file = self._loaders = None

    def _flush(self, until: float) -> None:
        """Device and host memory, as far as the time goes; what is oldest comes last."""
        keys = self._store.keys
        blocks = [
            *self._store.cached,
            *set(self._store.index.values()).difference(self._store.cached),
        ]
        on_device = [
            (key, partial(self._transfer.read, block))
            for block in reversed(blocks)
            if (key := keys[block]) is not None
        ]
        on_host = [(key, partial(_copy, row)) for key, row in self.host.newest()]
        for key, read in (*on_device, *on_host):
            while not self._stage(key, read):
                if time.monotonic() > until or self._paused_until:
                    return
                time.sleep(0.001)


COUNTED = (
    "host_hits",
    "host_stored",
    "file_hits",
    "file_stored",
    "file_errors",
    "file_late",
    "file_skipped",
    "tier_misses",
)


def _copy(row: Bytes, out: Bytes) -> None:
    out[:] = row


def _close(ref: weakref.ref[KVTiers]) -> None:
    tiers = ref()
    if tiers is not None:
        tiers.close()
