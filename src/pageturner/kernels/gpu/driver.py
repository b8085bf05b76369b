"""The interface of a device: memory, copies, launches, recordings. Must not know models or kernels.

Everything is ordered: a copy or a launch begins when those before it are done. Addresses are
integers, and multiples of 256 where memory begins. `CudaDriver` is the real one; tests have one
that interprets kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Graph = Any  # a recording that can be replayed
LATER = 1 << 18  # bytes that can be downloaded later


class Plane(NamedTuple):
    """A row-major matrix without gaps, of which a kernel fetches or writes boxes. Its address and
    the bytes of a row are multiples of 16."""

    address: int
    rows: int
    columns: int


class Rows(NamedTuple):
    """Memory of the device: so many rows of `nbytes`, which begin `pitch` bytes apart."""

    address: int
    nbytes: int
    rows: int
    pitch: int


class Driver(Protocol):
    """A device and one stream of work on it. Any thread may call it, one at a time.

    name, architecture  of the device; 90 for compute capability 9.0
    multiprocessors     of the device: a persistent kernel has as many programs
    fingerprint         what the bits of kernels depend on
    version             what else their numbers depend on: driver, compiled kernels; "": they are
                        interpreted
    dependent_launch    whether kernels that wait by themselves may begin beside the one in front
    """

    name: str
    architecture: int
    multiprocessors: int
    fingerprint: str
    version: str
    dependent_launch: bool

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    def alloc(self, nbytes: int) -> int:
        """Memory of the device. EngineFault('gpu_memory') when it is not there."""

    def free(self, address: int) -> None:
        """Give memory back."""

    def keep(self, data: NDArray[np.uint8]) -> int:
        """Memory that holds a copy, for `drop`. Any thread may call it, also while another one
        launches or records. EngineFault('gpu_memory') when it is not there."""

    def drop(self, address: int) -> None:
        """Free memory that was kept, by any thread and at any time: what is launched may go on
        reading it. It may be given back later."""

    def alloc_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Zeroed memory that other processes may open, and what they open it by. It lives until
        `close`."""

    def open_shared(self, handle: bytes) -> int:
        """Return the address here of memory of another process, perhaps of another device."""

    def host_word(self) -> int:
        """An int32 of the host, 0 at first, which kernels read and write as the host does."""

    def peers(self) -> list[bool]:
        """Return for every device that this process sees whether this one can read and write its
        memory."""

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros."""

    def upload(self, address: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to the device; it may be changed at once."""

    def upload_file(self, address: int, data: NDArray[np.uint8]) -> None:
        """The same of much memory that is mapped from a file, through two pinned buffers in
        turn."""

    def download(self, array: NDArray[Any], address: int) -> None:
        """Fill an array from the device, and wait for it."""

    def download_later(self, nbytes: int, address: int) -> Any:
        """Begin a copy to the host, of at most LATER bytes, for `wait`; until two more are
        begun."""

    def wait(self, later: Any) -> NDArray[np.uint8]:
        """Wait for a copy and return its bytes; work that was begun behind the copy goes on."""

    def gather(self, out: NDArray[np.uint8], places: Sequence[Rows]) -> None:
        """Fill a contiguous array with the rows of one place behind those of another, through
        pinned memory, and wait for them: all that was begun before ends first."""

    def scatter(self, places: Sequence[Rows], data: NDArray[np.uint8]) -> None:
        """Give rows what `gather` found in others; data may be changed at once, and nothing waits
        for the device as long as a pinned buffer is free."""

    def copy(
        self, destination: int, source: int, nbytes: int, rows: int = 1, pitch: int = 0
    ) -> None:
        """Within the device: nbytes, of each of so many rows that begin `pitch` bytes apart."""

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run a kernel of the catalogue; arguments in its order, addresses for pointers, and a
        `Plane` for what it reads or writes in boxes."""

    def begin_recording(self) -> None:
        """Keep what is launched and copied within the device from now on, in place of doing it."""

    def end_recording(self) -> Graph:
        """Return the kept memory."""

    def replay(self, graph: Graph) -> None:
        """Do it, with the same addresses."""

    def forget(self, graph: Graph) -> None:
        """Give back what a recording takes."""

    def synchronise(self) -> None:
        """Wait for everything. EngineFault('gpu_fault') if a kernel failed: the process must
        end."""

    def close(self) -> None:
        """Give back everything, what was never freed too; nothing may be called any more but this
        again."""
