"""The exchange between devices that compute one model together: sums over ranks, and columns
gathered.

Owns the memory that ranks write into at each other, and the launches. How an exchange works is in
source/ranks.py. Must not know models, nor what ranks say to each other on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import (
    EXCHANGE_AREA,
    EXCHANGE_BLOCK,
    EXCHANGE_PROGRAMS,
    EXCHANGE_RANKS,
    ONE_EXCHANGE,
    exchange_bytes,
)
from pageturner.kernels.gpu.driver import LATER, Driver

# looks at the flags of others before a rank gives up: some 30 s, at about 1 us each
PATIENCE = 1 << 25
ALIGNED = 16  # elements: vectors of 16 bytes, and whole lines at the boundaries of parts


def _up(count: int, step: int = ALIGNED) -> int:
    return -(-count // step) * step


def _shares(count: int) -> tuple[int, int]:
    """Programs for so many elements, and how many each has."""
    programs = min(-(-count // EXCHANGE_BLOCK), EXCHANGE_PROGRAMS)
    return programs, _up(-(-count // programs))


class DeviceExchange:
    """The sums and gathers of one rank. A launch meets those of the same number at all other ranks.
    They must have as many rows, or as many when these are rounded up to a power of two.

    one_exchange  bytes up to which a sum takes one exchange; None: by the number of ranks
    handle        what other processes open this rank's region by
    starts        first column of each rank in what is gathered, and the end; set before `gather`
    tell          of rank 0: around a gather, says to the others which rows it is about
    """

    starts: tuple[int, ...] = ()
    tell: Callable[[GpuArray], AbstractContextManager[None]]

    def __init__(
        self,
        driver: Driver,
        arena: Arena,
        rank: int,
        size: int,
        area: int = EXCHANGE_AREA,
        patience: int = PATIENCE,
        one_exchange: int | None = None,
    ) -> None:
        if size > EXCHANGE_RANKS:
            raise EngineFault(
                "bad_setting", f"at most {EXCHANGE_RANKS} GPUs compute one model, not {size}"
            )
        self._driver, self._arena = driver, arena
        self.rank, self.size = rank, size
        self._area, self._patience = area, patience
        usual = exchange_bytes(area) if size == 2 else ONE_EXCHANGE // size
        self._one = usual if one_exchange is None else one_exchange
        self._region, self.handle = driver.alloc_shared(exchange_bytes(area))
        self._word = driver.host_word()
        self._peers = driver.alloc(8 * size)
        self._zeros = driver.alloc(LATER)
        driver.clear(self._zeros, LATER)
        self._starts = 0

    def open(self, handles: list[bytes], here: dict[int, int] | None = None) -> None:
        """Before anything else: the regions of all ranks, by rank. here: addresses of those that
        are of this process."""
        known = {self.rank: self._region} | (here or {})
        addresses = [
            known[rank] if rank in known else self._driver.open_shared(handle)
            for rank, handle in enumerate(handles)
        ]
        self._driver.upload(self._peers, np.array(addresses, np.int64))

    @property
    def region(self) -> int:
        """Its address."""
        return self._region

    @property
    def lost(self) -> bool:
        """Return whether an exchange was given up: nothing that was computed since then is
        right."""
        return bool(ctypes.c_int32.from_address(self._word).value)

    def stop(self) -> None:
        """Exchanges that wait give up, and no later one waits. By any thread."""
        ctypes.c_int32.from_address(self._word).value = 1

    def sum(self, x: GpuArray, residual: GpuArray | None = None) -> GpuArray:
        """residual + ((rank 0's x + rank 1's) + ...): [M, N], at every rank."""
        rows, columns = x.shape
        out = self._arena.take(x.shape)
        step = max(self._room(1 << 62) * EXCHANGE_PROGRAMS // columns, 1)
        for first in range(0, rows, step):
            at = 4 * first * columns
            addresses = (x.address + at, residual.address + at if residual else 0, out.address + at)
            self._sum(addresses, min(step, rows - first), columns)
        return out

    def _sum(self, addresses: tuple[int, int, int], rows: int, columns: int) -> None:
        """The facts that ranks must have in common depend on the next power of two alone: a rank
        that has a step recorded, with more rows than there are, meets one that has not."""
        count = columns << (rows - 1).bit_length()
        twice = 4 * count > self._one
        programs, _ = _shares(count)
        room = self._room(count) // (self.size if twice else 1)
        if rows * columns > programs * self._room(count):
            raise EngineFault(
                "gpu_model", f"rows of {columns} elements are too long for sums over GPUs"
            )
        arguments = (
            *addresses,
            self._peers,
            self._word,
            int(addresses[1] != 0),
            self.rank,
            self.size,
            rows * columns,
            room,
            self._area,
            self._patience,
        )
        self._driver.launch("all_reduce_twice" if twice else "all_reduce", (programs,), arguments)

    def _room(self, count: int) -> int:
        """Elements of a program that its area has room for, in a sum of so many: of each rank all
        of them, or where a sum takes two exchanges each rank's part, and the sums."""
        blocks = self._area // EXCHANGE_BLOCK
        if 4 * count <= self._one:
            return blocks // self.size * EXCHANGE_BLOCK
        return blocks // (2 * self.size) * self.size * EXCHANGE_BLOCK

    def share(self, integers: int, count: int) -> None:
        """Every rank gets so many integers of rank 0, at this address of its own. Zeros are added
        to their bits, which change nothing: small integers are numbers below all others, and no sum
        rounds those."""
        partial = self._zeros if self.rank else integers
        self._sum((partial, 0, integers), 1, _up(count))

    def gather(self, mine: GpuArray, x: GpuArray) -> GpuArray:
        """Columns of all ranks side by side, at rank 0: [R, starts[-1]]. mine: this rank's, made of
        the rows x. At the others what they had."""
        if self.rank:
            self._gather(mine, 0)
            return mine
        out = self._arena.take((len(mine), self.starts[-1]))
        with self.tell(x):
            self._gather(mine, out.address)
        return out

    def _gather(self, mine: GpuArray, out: int) -> None:
        if not self._starts:
            self._starts = self._driver.alloc(4 * len(self.starts))
            self._driver.upload(self._starts, np.array(self.starts, np.int32))
        widest = max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))
        most = EXCHANGE_PROGRAMS * (self._area // self.size - ALIGNED)
        step = max(most // widest, 1)
        for first in range(0, len(mine), step):
            rows = min(step, len(mine) - first)
            programs, chunk = _shares(rows * widest)
            if chunk * self.size > self._area:
                raise EngineFault(
                    "gpu_model", f"{widest} tokens of a rank are too many to be gathered"
                )
            columns = mine.shape[1]
            arguments = (
                mine.address + 4 * first * columns,
                out + 4 * first * self.starts[-1] if out else 0,
                self._starts,
                self._peers,
                self._word,
                self.rank,
                self.size,
                rows,
                chunk,
                self._area,
                self._patience,
            )
            self._driver.launch("gather", (programs,), arguments)
