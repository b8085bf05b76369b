"""A device without a device: memory of this process, and Triton's interpreter behind the launcher."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.catalogue import kernels_of
from pageturner.kernels.gpu.driver import Plane, Rows
from support import gluon_interpreter, triton_interpreter


class FakeDriver:
    """`Driver`. Memory behind each allocation is filled with NaN patterns, so that reads of what was never
    written are seen. kept: addresses of what was kept and not dropped."""

    fingerprint = "interpreted"
    version = ""
    multiprocessors = 3

    def __init__(
        self, total: int = 1 << 30, architecture: int = 90, name: str = "fake", ordinal: int = 0
    ) -> None:
        self.name, self.architecture, self.total, self.ordinal = name, architecture, total, ordinal
        self.kernels = kernels_of(architecture)
        self.held: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        self.recording: list[tuple[Any, ...]] | None = None
        self.kept: set[int] = set()
        self.launched: list[str] = []
        self.replayed = 0

    def memory(self) -> tuple[int, int]:
        return self.total - sum(self.sizes.values()), self.total

    def alloc(self, nbytes: int) -> int:
        if self.recording is not None:
            raise AssertionError("no memory may be taken while a graph is recorded")
        return self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        if nbytes > self.memory()[0]:
            raise EngineFault("gpu_memory", f"{nbytes:,} bytes are not free on {self.name}")
        raw = np.full(nbytes + 512, 0xFF, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self.held[address], self.sizes[address] = raw, nbytes
        return address

    def keep(self, data: NDArray[np.uint8]) -> int:
        address = self._take(data.nbytes)
        self.kept.add(address)
        self.upload(address, data)
        return address

    def drop(self, address: int) -> None:
        if address in self.kept:
            self.kept.remove(address)
            self.free(address)

    def alloc_shared(self, nbytes: int) -> tuple[int, bytes]:
        """A file in memory, by which other processes find it, as long as this one lives."""
        fd = os.memfd_create("pageturner-fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        weakref.finalize(self, os.close, fd)
        return self._mapped(fd, nbytes), struct.pack("<qqq40x", os.getpid(), fd, nbytes)

    def open_shared(self, handle: bytes) -> int:
        pid, name, nbytes = struct.unpack("<qqq40x", handle)
        fd = os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._mapped(fd, nbytes)
        finally:
            os.close(fd)

    def _mapped(self, fd: int, nbytes: int) -> int:
        raw = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self.held[raw.ctypes.data], self.sizes[raw.ctypes.data] = raw, nbytes
        return int(raw.ctypes.data)

    def host_word(self) -> int:
        address = self._take(4)
        self.clear(address, 4)
        return address

    def peers(self) -> list[bool]:
        return [True] * int(os.environ.get("PAGETURNER_FAKE_DEVICES", "4"))

    def free(self, address: int) -> None:
        del self.held[address], self.sizes[address]

    def clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def upload(self, address: int, data: NDArray[Any]) -> None:
        assert data.flags.c_contiguous
        self._inside(address, data.nbytes)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    upload_file = upload

    def download(self, array: NDArray[Any], address: int) -> None:
        self._inside(address, array.nbytes)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def gather(self, out: NDArray[np.uint8], places: Sequence[Rows]) -> None:
        assert out.flags.c_contiguous
        at = out.ctypes.data
        for address, nbytes, rows, pitch in places:
            for row in range(rows):
                self._inside(address + row * pitch, nbytes)
                ctypes.memmove(at, address + row * pitch, nbytes)
                at += nbytes
        assert at == out.ctypes.data + out.nbytes

    def scatter(self, places: Sequence[Rows], data: NDArray[np.uint8]) -> None:
        assert data.flags.c_contiguous
        at = data.ctypes.data
        for address, nbytes, rows, pitch in places:
            for row in range(rows):
                self._inside(address + row * pitch, nbytes)
                ctypes.memmove(address + row * pitch, at, nbytes)
                at += nbytes
        assert at == data.ctypes.data + data.nbytes

    def download_later(self, nbytes: int, address: int) -> Any:
        later = np.empty(nbytes, np.uint8)
        self.download(later, address)
        return later

    def wait(self, later: Any) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = later
        return found

    def copy(
        self, destination: int, source: int, nbytes: int, rows: int = 1, pitch: int = 0
    ) -> None:
        if self.recording is not None:
            self.recording.append(("copy", destination, source, nbytes, rows, pitch))
            return
        for row in range(rows):
            self._inside(destination + row * pitch, nbytes)
            ctypes.memmove(destination + row * pitch, source + row * pitch, nbytes)

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        found = self.kernels[kernel]
        assert len(arguments) == len(found.arguments), kernel
        for name, value in zip((one for one, _ in found.arguments), arguments, strict=True):
            assert isinstance(value, (int, float, Plane)), f"{kernel}: {name} is {type(value)}"
        if self.recording is not None:
            self.recording.append(("launch", kernel, tuple(grid), tuple(arguments)))
            return
        self.launched.append(kernel)
        gluon = any(isinstance(value, Plane) for value in arguments)
        (gluon_interpreter if gluon else triton_interpreter).run(found, grid, arguments)

    def begin_recording(self) -> None:
        self.recording = []

    def end_recording(self) -> Any:
        kept, self.recording = self.recording, None
        return kept

    def replay(self, graph: Any) -> None:
        self.replayed += 1
        for what, *arguments in graph:
            getattr(self, what)(*arguments)

    def forget(self, graph: Any) -> None:
        graph.clear()

    def synchronise(self) -> None:
        return None

    def close(self) -> None:
        self.held.clear()
        self.sizes.clear()

    def _inside(self, address: int, nbytes: int) -> None:
        """Of one allocation."""
        for begin, size in self.sizes.items():
            if begin <= address and address + nbytes <= begin + size:
                return
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not one allocation's")
