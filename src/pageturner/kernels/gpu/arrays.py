"""Arrays on a device, and where a step's lie: one arena that is filled from its beginning in every
step.

Owns addresses and sizes. Must not know operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.base import I32
from pageturner.kernels.gpu.catalogue import MAX_SPLIT_TILES
from pageturner.kernels.gpu.driver import Driver

BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "i32": 4, "i64": 8, "u8": 1, "i8": 1}
ALIGNED = 256


def padded(nbytes: int) -> int:
    """Round up to where the next array may begin."""
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(slots=True)
class GpuArray:
    """A row-major array at an address. stride: elements from one row to the next, where rows lie
    apart; narrow: the same values rounded to other kinds, once somebody needed them; ordered: their
    columns in other orders, by the digest of an order, b"" for that of the matrix unit."""

    address: int
    shape: tuple[int, ...]
    kind: str = "fp32"
    stride: int = 0
    narrow: dict[str, GpuArray] = field(default_factory=dict)
    ordered: dict[bytes, GpuArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.kind]

    @property
    def row(self) -> int:
        """Elements from one row to the next."""
        return self.stride or prod(self.shape[1:])

    def rows(self, part: slice) -> GpuArray:
        """Some rows, from one to another, in the same memory."""
        begin, end, _ = part.indices(self.shape[0])
        at = self.address + begin * self.row * BYTES[self.kind]
        return GpuArray(at, (end - begin, *self.shape[1:]), self.kind, self.stride)

    def columns(self, begin: int, end: int) -> GpuArray:
        """Some columns of every row, in the same memory."""
        return GpuArray(
            self.address + begin * BYTES[self.kind],
            (self.shape[0], end - begin),
            self.kind,
            self.row,
        )


class Arena:
    """Memory for what a step computes. Arrays are taken one behind the other and given back all at
    once, so that the same step takes the same addresses again: recordings depend on it.

    Layers take turns in two halves: what a block of one computed lies in one half while the next
    block fills the other. So a step needs the memory of two blocks, however many layers there are.

    counters  address of MAX_SPLIT_TILES int32 behind all that, which are 0 before each kernel and
              behind it
    """

    def __init__(self, driver: Driver, nbytes: int, begin: int = 0) -> None:
        """begin: an address, where the memory is there already."""
        self._driver = driver
        self._begin = begin or driver.alloc(padded(nbytes) + 4 * MAX_SPLIT_TILES)
        self.size, self.counters = nbytes, 0
        if not begin:
            self.counters = self._begin + padded(nbytes)
            driver.clear(self.counters, 4 * MAX_SPLIT_TILES)
        self._used = 0
        self._end = nbytes
        self._halves: tuple[int, ...] = ()  # where they begin
        self.most = 0

    def release(self) -> None:
        """Give its memory back; it may not be used any more."""
        self._driver.free(self._begin)

    @property
    def mark(self) -> int:
        """The place up to which the arena is taken; `reset` goes back to it."""
        return self._used

    def reset(self, mark: int = 0) -> None:
        self._used, self._end, self._halves = mark, self.size, ()

    def halve(self) -> None:
        """Make the free part two halves; the first one is in use."""
        middle = self._used + (self.size - self._used) // 2 // ALIGNED * ALIGNED
        self._halves, self._end = (middle, self._used), middle

    def turn(self) -> None:
        """Go on at the beginning of the other half; nothing where there are none."""
        if self._halves:
            self._used, other = self._halves
            self._end = self.size if self._used > other else other
            self._halves = other, self._used

    def rejoin(self) -> None:
        """The end of the halves: all behind what was taken last is free."""
        self._end, self._halves = self.size, ()

    def take(self, shape: tuple[int, ...], kind: str = "fp32") -> GpuArray:
        """EngineFault('gpu_memory') when it does not fit."""
        array = GpuArray(self._begin + self._used, shape, kind)
        self._used += padded(array.nbytes)
        self.most = max(self.most, self._used)
        if self._used > self._end:
            raise EngineFault(
                "gpu_memory",
                f"a step needs more than the {self.size:,} bytes that are set aside for it:"
                " lower --max-num-batched-tokens, or --max-num-seqs",
            )
        return array

    def upload(self, arrays: Sequence[I32]) -> list[GpuArray]:
        """Arrays of int32 in one copy; each begins where an array may. EngineFault as `take`."""
        sizes = [padded(array.nbytes) // BYTES["i32"] for array in arrays]
        whole = np.zeros(max(sum(sizes), 1), np.int32)
        region = self.take(whole.shape, "i32")
        placed, at = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            whole[at : at + array.size] = array.reshape(-1)
            placed.append(GpuArray(region.address + BYTES["i32"] * at, array.shape, "i32"))
            at += size
        self._driver.upload(region.address, whole)
        return placed
