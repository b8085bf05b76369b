"""A file of KV blocks, found by their keys: it outlives its engine, and engines of one machine
share it.

Owns the layout of the file, who may write into it, and which block goes when it is full (the one
that was used longest ago). One engine at a time writes, which a lock says; the others read, and the
first that finds the lock free goes on writing.

    head       what the file is for, and a digest of that; behind it a number that goes up with each
               change
    directory  one record for each slot: key, checksum, stamp; a checksum of 0: nothing is there
    slots      the bytes of one block each, on borders of pages

A process may die between any two calls of the system, so the file is true at each of them: a record
is struck out before its slot is written, and written behind it. Nothing is trusted that is read:
the checksum, begun with the key, tells what a crash of the machine, a bad disk or a writer that was
faster left behind. Blocks are read with `pread` and not through a mapping, in which a bad disk or a
cut file would kill the engine (SIGBUS). Must not know requests, stores of blocks or threads but for
its own locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import threading
from collections import OrderedDict
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kv.kv_file import row_sums
from pageturner.private_files import NotPrivate, open_private

MAGIC = b"ptblk\0\0\1"  # the last byte: version of the layout
HEAD = struct.Struct("<8s32s2Q")  # magic, identity, bytes of a block, slots
DIGEST = 16  # bytes, behind the head
CHANGES_AT, CHANGES = 1024, struct.Struct("<Q")
PAGE = 4096
RECORD = np.dtype([("key", "V16"), ("sum", "<u8"), ("stamp", "<u8")])
_NO_WAITING = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # this file system has no such reads

Bytes = NDArray[np.uint8]


class Read(Enum):
    """The outcome of looking for a block."""

    HIT = "hit"
    ABSENT = "absent"
    WAIT = "wait"  # it lies on the disk, and whoever asked must not wait for that
    BAD = "bad"  # it was there, and is not what was written


def sum_of(row: Bytes, key: bytes) -> int:
    """The checksum of a block's bytes, begun with half of its key."""
    return int(row_sums(row[None], np.frombuffer(key[:8], np.uint64))[0])


class BlockFile:
    """Blocks of `nbytes` bytes. EngineFault says why a file cannot be used; it is left as it was
    then.

    size      bytes that a new file may take; one that is there keeps its own
    identity  32 bytes that name everything on which the bytes of a block depend
    writes    this engine is the one that writes
    waits     reads may have to wait for the disk: the file system has no reads that never do
    """

    def __init__(self, path: str, size: int, identity: bytes, nbytes: int) -> None:
        self.path, self.nbytes, self._identity = path, nbytes, identity
        self._stride = -(-nbytes // PAGE) * PAGE
        self.writes = self.waits = False
        self._writing = threading.Lock()  # held for as long as one block takes
        self._mutex = threading.Lock()  # of what stands below; never held while the disk is asked
        # key -> slot, checksum; LRU first
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._free: list[int] = []
        self._stamp = self._changes = self._floor = 0
        self._records = np.zeros(0, RECORD)
        self._fd, self._may_write = self._open()
        try:
            self._begin(size)
        except OSError as error:
            raise _fault(path, error) from error

    # -- opening -----------------------------------------------------------------------------------
    def _open(self) -> tuple[int, bool]:
        try:
            fd, may_write = open_private(self.path), True
        except NotPrivate as error:
            raise _fault(self.path, error) from error
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not os.path.exists(
                self.path
            ):
                raise _fault(self.path, error) from error
            try:
                fd, may_write = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), False
            except OSError as second:
                raise _fault(self.path, second) from second
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(fd)
            message = "is no regular file, or others may change it: name another path"
            raise EngineFault("kv_file", f"--kv-file {self.path} {message}")
        return fd, may_write

    def _begin(self, size: int) -> None:
        locked = self._may_write and self._lock()
        if locked and os.fstat(self._fd).st_size == 0:
            slots = (size - 2 * PAGE) // (self._stride + RECORD.itemsize)
            if slots < 1:
                raise EngineFault(
                    "kv_file_size",
                    f"--kv-file-size {size} has no room for a block of {self.nbytes} bytes: ask for more",
                )
            _write(self._fd, self._head(slots).ljust(PAGE, b"\0"), 0)
        head = os.pread(self._fd, HEAD.size + DIGEST, 0)
        if not head and not locked:
            raise EngineFault("kv_file", f"--kv-file {self.path} is empty and cannot be written")
        slots = HEAD.unpack(head[: HEAD.size])[3] if len(head) == HEAD.size + DIGEST else 0
        if not slots or head != self._head(slots):
            raise EngineFault(
                "kv_file_other",
                f"--kv-file {self.path} is not of this model, build, KV type and block size, or damaged: it"
                " is left as it is; name another path, or delete it if nobody needs it",
            )
        self.slots = int(slots)
        self._data_at = PAGE + -(-self.slots * RECORD.itemsize // PAGE) * PAGE
        self._records = np.zeros(self.slots, RECORD)
        self._read_directory()
        if locked:
            self._take_over()

    def _head(self, slots: int) -> bytes:
        head = HEAD.pack(MAGIC, self._identity, self.nbytes, slots)
        return head + hashlib.blake2b(head, digest_size=DIGEST).digest()

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _take_over(self) -> None:
        """Begin to write: it knows the directory as the writer before left it."""
        with self._mutex:
            used = {slot for slot, _ in self._slots.values()}
            self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in used]
            self._stamp = int(self._records["stamp"].max(initial=0))
            self.writes = True

    def refresh(self) -> None:
        """See what another engine has written, and write from here on if it has gone. OSError."""
        if self.writes:
            return
        locked = self._may_write and self._lock()
        changes = os.pread(self._fd, CHANGES.size, CHANGES_AT)
        if locked or changes != CHANGES.pack(self._changes):
            self._read_directory()
        if locked:
            self._take_over()

    def _read_directory(self) -> None:
        changes = os.pread(self._fd, CHANGES.size, CHANGES_AT)
        raw = os.pread(self._fd, self.slots * RECORD.itemsize, PAGE).ljust(
            self.slots * RECORD.itemsize, b"\0"
        )
        records = np.frombuffer(raw, RECORD)
        there = np.flatnonzero((records["sum"] != 0) & (records["stamp"] > self._floor))
        order = there[np.argsort(records["stamp"][there], kind="stable")]
        keys, sums = records["key"][order].tobytes(), records["sum"][order].tolist()
        found: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        for i, slot in enumerate(order.tolist()):
            key = keys[16 * i : 16 * i + 16]
            found[key] = (slot, sums[i])  # of two with one key the newer
            found.move_to_end(key)
        with self._mutex:
            self._slots, self._records = found, records
            self._changes = CHANGES.unpack(changes.ljust(CHANGES.size, b"\0"))[0]

    # -- what is there -----------------------------------------------------------------------------
    @property
    def count(self) -> int:
        """Blocks that are there."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def touch(self, key: bytes) -> None:
        """It was used just now."""
        with self._mutex:
            if key in self._slots:
                self._slots.move_to_end(key)

    def read(self, key: bytes, out: Bytes, wait: bool) -> Read:
        """The block of this key into `out`, if it is there and what was written. wait: for the
        disk, too."""
        place = self._slots.get(key)
        if place is None:
            return Read.ABSENT
        slot, checksum = place
        flags = 0 if wait or self.waits else os.RWF_NOWAIT
        try:
            count = os.preadv(self._fd, [out.data], self._data_at + slot * self._stride, flags)
        except BlockingIOError:
            return Read.WAIT
        except OSError as error:
            if flags and error.errno in _NO_WAITING:
                self.waits = True
                return Read.WAIT
            return Read.BAD
        if count < self.nbytes and flags:
            return Read.WAIT  # the rest lies on the disk
        if count == self.nbytes and sum_of(out, key) == checksum:
            self.touch(key)
            return Read.HIT
        return (
            Read.BAD
            if self._slots.get(key) == place and self._still(slot, key, checksum)
            else Read.ABSENT
        )

    def _still(self, slot: int, key: bytes, checksum: int) -> bool:
        """Return whether the file says so too: if not, another engine has written there
        meanwhile."""
        try:
            raw = os.pread(self._fd, RECORD.itemsize, PAGE + slot * RECORD.itemsize)
        except OSError:
            return True
        return raw[:24] == key + checksum.to_bytes(8, "little")

    # -- writing: one thread of the engine that writes ---------------------------------------------
    def write(self, key: bytes, row: Bytes) -> None:
        """Put a block there, in place of the one that was used longest ago. OSError: it is not
        there, and the file is as true as before."""
        with self._writing:
            if self.writes and key not in self._slots:
                self._write(key, row)

    def _write(self, key: bytes, row: Bytes) -> None:
        with self._mutex:
            full = not self._free
            slot = self._slots.popitem(last=False)[1][0] if full else self._free.pop()
        try:
            if full:
                self._record(slot, bytes(16), 0)
            _write(self._fd, row.data, self._data_at + slot * self._stride)
            checksum = sum_of(row, key)
            self._record(slot, key, checksum)
        except OSError:
            with self._mutex:
                self._free.append(slot)
            raise
        with self._mutex:
            self._slots[key] = (slot, checksum)

    def strike_out(self, key: bytes) -> None:
        """Nobody will find this block any more, here; where this engine writes, nobody at all."""
        with self._mutex:
            place = self._slots.pop(key, None)
            if place is None or not self.writes:
                return
        try:
            self._record(place[0], bytes(16), 0)
        except OSError:
            return  # its checksum is wrong for the next engine too; the slot is not used again by this one
        with self._mutex:
            self._free.append(place[0])

    def _record(self, slot: int, key: bytes, checksum: int) -> None:
        self._stamp += 1
        self._changes += 1
        record = key + struct.pack("<2Q", checksum, self._stamp)
        _write(self._fd, record, PAGE + slot * RECORD.itemsize)
        _write(self._fd, CHANGES.pack(self._changes), CHANGES_AT)

    def forget(self) -> None:
        """Use nothing that is there now. Where this engine writes, it is gone for all. OSError."""
        with self._writing, self._mutex:
            self._floor = int(self._records["stamp"].max(initial=0))
            self._slots.clear()
            if self.writes:
                _write(self._fd, bytes(self.slots * RECORD.itemsize), PAGE)
                self._free = list(range(self.slots - 1, -1, -1))

    def close(self) -> None:
        """Note which blocks were used last, and let others write. Nobody may be using it."""
        if self._fd < 0:
            return
        if self.writes:
            records = np.zeros(self.slots, RECORD)
            for key, (slot, checksum) in self._slots.items():
                self._stamp += 1
                records[slot] = (key, checksum, self._stamp)
            with contextlib.suppress(
                OSError
            ):  # the order alone is lost: no record lies on two pages
                _write(self._fd, records.tobytes(), PAGE)
        self.writes = False
        os.close(self._fd)
        self._fd = -1


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of it. OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _fault(path: str, error: OSError) -> EngineFault:
    return EngineFault(
        "kv_file", f"--kv-file {path}: {error.strerror or error}: name a path that can be written"
    )
