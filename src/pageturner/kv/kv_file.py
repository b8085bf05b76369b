"""KV storage of the native backend that lies in a memory file, and checksums of its blocks.

Owns how such storage is mapped and what a checksum is. Must not know what else is in the file,
whose it is or what is in a block. A file outlives the process that writes into it: what is there
stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.base import I32, KV, KV_TYPES, KVSpec
from pageturner.kernels.cpu import native_module

HUGE_PAGE = 2 << 20
OVERREAD = 64  # bytes behind the storage that kernels may read: kOverread in kernels.h
AHEAD = 16 << 20  # bytes that are put on huge pages before anybody writes into them
FEW = 8  # blocks of which one thread makes the checksums faster than threads are started

U64 = NDArray[np.uint64]


def room(spec: KVSpec) -> int:
    """Bytes that storage takes in a file: a multiple of a huge page."""
    return -(-(spec.nbytes + OVERREAD) // HUGE_PAGE) * HUGE_PAGE


def alloc(spec: KVSpec, fd: int, offset: int) -> KV:
    """The storage that begins at `offset`, a multiple of a huge page, and has room there. Zeros
    where nobody has written. EngineFault('kv_memory') when the system refuses to map it."""
    try:
        return native_module.module().alloc_kv(
            spec.layers,
            spec.blocks,
            spec.block_size,
            spec.kv_heads,
            spec.head_dim,
            list(KV_TYPES).index(spec.dtype),
            fd,
            offset,
            spec.latent,
        )
    except MemoryError as error:
        raise EngineFault(
            "kv_memory",
            f"the system refuses to map {spec.nbytes / 1e6:.0f} MB of KV memory:"
            " ask for less of it",
        ) from error


def row_sums(rows: NDArray[np.uint8], seeds: U64) -> U64:
    """XXH64 of plain rows [n, bytes], begun with seeds, which need not be KV of this backend. Where
    the compiled module is absent it is made with BLAKE2b. Never 0."""
    sums = np.zeros(len(rows), np.uint64)
    if native_module.available_isas():
        native_module.module().row_sums(rows, seeds, sums)
    else:
        for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            digest = blake2b(
                np.ascontiguousarray(row).data, key=seed.tobytes(), digest_size=8
            ).digest()
            sums[i] = int.from_bytes(digest, "little")
    return np.maximum(sums, np.uint64(1))


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The storage of KV as a survival file sees it; kv: None where blocks have no bytes."""

    chained: ClassVar[bool] = True
    kv: KV | None
    threads: int

    def checksums(self, blocks: I32, seeds: U64) -> U64:
        """XXH64 of the bytes of each block, all its layers, begun with its seed: never 0, which
        stands for none."""
        sums = np.zeros(len(blocks), np.uint64)
        if self.kv is not None:
            threads = self.threads if len(blocks) > FEW else 1
            native_module.module().block_sums(self.kv, blocks, seeds, threads, sums)
        return np.maximum(sums, np.uint64(1))

    def take_huge_pages(self, blocks: int) -> None:
        """Put the first so many blocks on huge pages, and a little more: they are taken from the
        first on."""
        if self.kv is not None:
            self.kv.take_huge_pages(blocks * self.kv.memory.shape[1] + AHEAD)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The slots of recurrent states [slots, bytes], seen so."""

    chained: ClassVar[bool] = False
    states: NDArray[np.uint8]

    def checksums(self, blocks: I32, seeds: U64) -> U64:
        """`row_sums` of each slot, where it lies: slots are large."""
        sums = np.zeros(len(blocks), np.uint64)
        for i, block in enumerate(blocks):
            sums[i] = row_sums(self.states[block : block + 1], seeds[i : i + 1])[0]
        return sums

    def take_huge_pages(self, blocks: int) -> None:
        """They are left to the system."""


StoredBytes = KVBytes | StateBytes  # chained: a block is of use only with those before it
