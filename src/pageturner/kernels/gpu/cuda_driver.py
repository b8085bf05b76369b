"""`Driver` on CUDA's driver interface, by the package cuda-bindings. The extra `gpu` installs it.

Owns the context, one stream, pinned buffers and loaded kernels. Must not know what kernels compute.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault, pip_install
from pageturner.kernels.gpu.driver import LATER, Graph, Rows
from pageturner.kernels.gpu.manifest import Compiled, Manifest
from pageturner.kernels.gpu.presence import nvidia_is_here
from pageturner.kernels.gpu.tensor_maps import TensorMaps

OLDEST_DRIVER = 12000  # CUDA 12.0
DEPENDENT_DRIVER = (
    12030  # from here on a recording keeps which kernels may begin beside the one in front
)
SLOT, SLOTS = 1 << 20, 16  # bytes and number of the pinned buffers of small uploads
PAGE = 16 << 20  # bytes of each of the two of large ones
SLICE = 4 << 20  # of what is kept
_C_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
_STATIC_SHARED = 48 << 10  # bytes of shared memory that need no asking
# CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far; a layer of KV may be larger
_MAX_PITCH = (1 << 31) - 1
# What cuda-bindings says where a driver has no such call, or is of before CUDA 12.0 and has no
# table of them
_ABSENT_CALL = re.compile("not found|cuGetProcAddress")
_HANDLE = 64  # CU_IPC_HANDLE_SIZE
_MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP
_SHARED_PAGE = 2 << 20  # bytes: of smaller memory the device's driver shares more than was meant


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        absent = f"the package cuda-bindings is absent ({error}): {pip_install('gpu')}"
        message = f"{absent}, or use --device cpu"
        if not nvidia_is_here():
            message = f"this machine shows no NVIDIA GPU: use --device cpu (for another: {absent})"
        raise EngineFault("gpu_absent", message) from error
    return driver


def _installed(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The number of the NVIDIA driver, where it can be read."""
    try:
        found = re.search(r"\d+\.\d+[.\d]*", path.read_text())
    except OSError:
        return ""
    return f", driver {found[0]}" if found else ""


class _Threads(threading.local):
    """Return whether the context is current in this thread."""

    entered = False


def in_pages(places: Sequence[Rows]) -> Iterator[tuple[list[tuple[Rows, int]], int]]:
    """Places in order, cut so that those of a page fit a pinned buffer: each with where it begins
    there; and bytes of the page. Rows of more than a page come alone, in pieces."""
    page: list[tuple[Rows, int]] = []
    filled = 0
    for piece in (piece for place in places for piece in _pieces(place)):
        if filled + piece.nbytes * piece.rows > PAGE:
            yield page, filled
            page, filled = [], 0
        page.append((piece, filled))
        filled += piece.nbytes * piece.rows
    if page:
        yield page, filled


def _pieces(place: Rows) -> Iterator[Rows]:
    """Each at most a page."""
    address, nbytes, rows, pitch = place
    most = PAGE // nbytes
    for first in range(0, rows, max(most, 1)):
        at = address + first * pitch
        if most:
            yield Rows(at, nbytes, min(most, rows - first), pitch)
            continue
        for begin in range(0, nbytes, PAGE):
            yield Rows(at + begin, min(PAGE, nbytes - begin), 1, pitch)


class CudaDriver:
    """Device `ordinal` of this machine. EngineFault('gpu_absent') without one, ('gpu_driver') for a
    driver that is too old, ('gpu_kernels') for a device without kernels, ('gpu_memory') if its
    buffers do not fit.

    Any thread may call it, one at a time.

    bindings          in place of cuda.bindings.driver
    manifest_s        seconds that reading the manifest and the kernels of this architecture took;
                      none is unpacked
    dependent_launch  whether kernels that wait by themselves may begin beside the one in front;
                      benches switch it off
    """

    def __init__(
        self, manifest: Manifest | None = None, ordinal: int = 0, bindings: Any | None = None
    ) -> None:
        self._cu = cu = bindings or _bindings()
        self.ordinal = ordinal
        self._context: Any = None
        self._threads = _Threads()
        self._device = device = self._found(ordinal)
        attribute = cu.CUdevice_attribute
        major, minor, self.multiprocessors = (
            self._ask("cuDeviceGetAttribute", one, device)
            for one in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        self.name = self._ask("cuDeviceGetName", 256, device).partition(b"\0")[0].decode()
        begin = time.perf_counter()
        manifest = manifest or Manifest()
        self.architecture, portable = manifest.choose(10 * major + minor)
        if portable:
            self._need(
                manifest.portable_cuda, "to compile our kernels for this device, which has none"
            )
        self.fingerprint = manifest.source[:12] + ("-ptx" if portable else "")
        self.version += f", kernels {manifest.digest}"
        self._compiled = manifest.kernels(self.architecture, portable)
        self.manifest_s = time.perf_counter() - begin
        self._loaded: dict[str, Any] = {}
        self._maps = TensorMaps()
        self._modules: list[Any] = []
        self._graphs: list[Any] = []
        self._memory: set[int] = set()
        self._opened: list[int] = []  # memory of other processes
        self._buffers: list[tuple[int, Any]] = []
        self._turns: dict[int, Iterator[tuple[int, Any]]] = {}
        self._thread, self._recording = threading.get_ident(), False  # of those who step
        self._behind_kernel = False  # whether the last call was a launch
        self._keeping = threading.Lock()
        self._beside: Any = None  # the stream of those who keep
        self._kept: set[int] = set()
        self._dropped: deque[int] = deque()
        self._stream: Any = None
        self._context = self._ask("cuDevicePrimaryCtxRetain", device)
        try:
            self._stream = self._ask("cuStreamCreate", cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._buffer(SLOT)  # all of them: no upload should wait for memory
        except EngineFault:
            self.close()
            raise

    def _found(self, ordinal: int) -> Any:
        """The device."""
        cu = self._cu
        try:
            result = cu.cuInit(0)[0]
        except (
            RuntimeError
        ) as error:  # the package looks for the NVIDIA driver when it is first called
            if _ABSENT_CALL.search(str(error)):
                raise self._too_old(error) from error
            told = str(error).partition("\n")[0]
            raise EngineFault(
                "gpu_absent", f"no NVIDIA driver can be loaded here ({told}); use --device cpu"
            ) from error
        if int(result):
            message = f"no CUDA device can be used here ({self._named(result)}); use --device cpu"
            raise EngineFault("gpu_absent", message)
        version = self._ask("cuDriverGetVersion")
        self.version = f"CUDA {version}{_installed()}"
        self.dependent_launch = version >= DEPENDENT_DRIVER
        self._cuda = version
        self._need(OLDEST_DRIVER, "")
        count = self._ask("cuDeviceGetCount")
        if ordinal >= count:
            raise EngineFault(
                "gpu_absent", f"there are {count} CUDA devices here; use --device cpu"
            )
        return self._ask("cuDeviceGet", ordinal)

    def _need(self, version: int, what_for: str) -> None:
        """EngineFault('gpu_driver') where the NVIDIA driver is for a CUDA older than this
        version."""
        if self._cuda < version:
            have, need = (f"{one // 1000}.{one % 1000 // 10}" for one in (self._cuda, version))
            told = f"the NVIDIA driver is for CUDA {have}, and {need} is needed {what_for}".rstrip()
            raise EngineFault("gpu_driver", f"{told}: renew it, or use --device cpu")

    def close(self) -> None:
        """Give back everything: recordings, kernels, all memory of the device and pinned memory,
        and the context, which others of this process may go on using. A second time nothing is
        done. Never fails: after a fault of the device everything ends with the process anyway."""
        if self._context is None:
            return
        self._kept.clear()
        self._dropped.clear()
        cu = self._cu
        self._make_current()
        streams = [one for one in (self._stream, self._beside) if one is not None]
        for one in streams:
            cu.cuStreamSynchronize(one)
        given = [(cu.cuGraphExecDestroy, one) for one in self._graphs]
        for address, event in self._buffers:
            given += [(cu.cuEventDestroy, event), (cu.cuMemFreeHost, address)]
        given += [(cu.cuModuleUnload, one) for one in self._modules]
        given += [(cu.cuIpcCloseMemHandle, one) for one in self._opened]
        given += [(cu.cuMemFree, one) for one in self._memory]
        given += [(cu.cuStreamDestroy, one) for one in streams]
        for function, what in given:
            function(what)
        cu.cuDevicePrimaryCtxRelease(self._device)
        self._context, self._threads = None, _Threads()

    # -- asking ------------------------------------------------------------------------------------
    def _named(self, result: Any) -> str:
        return str(getattr(result, "name", result))

    def _make_current(self) -> None:
        """A thread that never called before has no context: the engine may be built in one and run
        in another."""
        self._threads.entered = True
        self._cu.cuCtxSetCurrent(self._context)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return what a call of the driver gives. EngineFault for whatever it fails with:
        afterwards the context is of no use."""
        self._behind_kernel = False
        if self._context is not None and not self._threads.entered:
            self._make_current()
        call = getattr(self._cu, function)
        try:
            result, *found = call(*arguments)
        except RuntimeError as error:  # of the package
            if _ABSENT_CALL.search(str(error)):
                raise self._too_old(error) from error
            raise self._fault(function, str(error)) from error
        if int(result):
            raise self._fault(function, self._named(result))
        return found[0] if len(found) == 1 else tuple(found)

    def _too_old(self, error: RuntimeError) -> EngineFault:
        told = str(error).partition("\n")[0]
        message = f"the NVIDIA driver is too old ({told}): renew it, or use --device cpu"
        return EngineFault("gpu_driver", message)

    def _fault(self, function: str, name: str) -> EngineFault:
        if name == "CUDA_ERROR_OUT_OF_MEMORY" and function == "cuMemHostAlloc":
            message = (
                "the host has no more memory that can be pinned: free some, or use --device cpu"
            )
            return EngineFault("gpu_memory", message)
        if name == "CUDA_ERROR_OUT_OF_MEMORY":
            _, free, *_ = self._cu.cuMemGetInfo()
            message = f"the memory of {self.name} is full ({free or 0:,} bytes are free): take a smaller or"
            return EngineFault(
                "gpu_memory", f"{message} quantised model, or lower --kv-cache-memory"
            )
        if name == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION":
            message = "the NVIDIA driver cannot compile our kernels for this device, which is newer than they are"
            return EngineFault("gpu_driver", f"{message}: renew it, or use --device cpu")
        return EngineFault("gpu_fault", f"{function} failed: {name}")

    def _pinned(self, nbytes: int, flags: int = 0) -> tuple[int, Any]:
        """Memory that the device reads by itself, and an event that tells when it has."""
        address = int(self._ask("cuMemHostAlloc", nbytes, flags))
        event = self._ask("cuEventCreate", self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._buffers.append((address, event))
        return address, event

    def _buffer(self, nbytes: int) -> tuple[int, Any]:
        """The next one of the pinned buffers of this size, which are used in turn, and its
        event."""
        if nbytes not in self._turns:
            count = SLOTS if nbytes == SLOT else 2
            self._turns[nbytes] = cycle([self._pinned(nbytes) for _ in range(count)])
        return next(self._turns[nbytes])

    # -- memory ------------------------------------------------------------------------------------
    def memory(self) -> tuple[int, int]:
        free, total = self._ask("cuMemGetInfo")
        return int(free), int(total)

    def keep(self, data: NDArray[np.uint8]) -> int:
        """Copy on a stream of its own, which is never recorded. In slices: what a step uploads
        meanwhile waits for one of them at most."""
        with self._keeping:
            if self._beside is None:
                flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._beside = self._ask("cuStreamCreate", flags)
            address = self.alloc(data.nbytes)
            self._kept.add(address)
            for begin in range(0, data.nbytes, SLICE):
                nbytes = min(SLICE, data.nbytes - begin)
                source = data.ctypes.data + begin
                self._ask("cuMemcpyHtoDAsync", address + begin, source, nbytes, self._beside)
                self._ask("cuStreamSynchronize", self._beside)
            return address

    def drop(self, address: int) -> None:
        """Another thread than that of the steps, and one that records, must not wait for the
        stream: the next upload frees it. Behind `close` there is nothing left to be freed."""
        if address not in self._kept:
            return
        self._kept.remove(address)
        self._dropped.append(address)
        if threading.get_ident() == self._thread and not self._recording:
            self._free_dropped()

    def _free_dropped(self) -> None:
        while self._dropped:
            self.free(self._dropped.popleft())

    def alloc(self, nbytes: int) -> int:
        address = int(self._ask("cuMemAlloc", max(nbytes, 1)))
        self._memory.add(address)
        return address

    def free(self, address: int) -> None:
        self.synchronise()
        self._ask("cuMemFree", address)
        self._memory.discard(address)

    def alloc_shared(self, nbytes: int) -> tuple[int, bytes]:
        nbytes = -(-nbytes // _SHARED_PAGE) * _SHARED_PAGE
        address = self.alloc(nbytes)
        self.clear(address, nbytes)
        self.synchronise()
        handle = self._ask("cuIpcGetMemHandle", address)
        return address, ctypes.string_at(handle.getPtr(), _HANDLE)

    def open_shared(self, handle: bytes) -> int:
        opened = self._cu.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE)
        flags = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(self._ask("cuIpcOpenMemHandle", opened, flags.value))
        self._opened.append(address)
        return address

    def host_word(self) -> int:
        address, _ = self._pinned(4, _MAPPED)
        ctypes.c_int32.from_address(address).value = 0
        return address

    def peers(self) -> list[bool]:
        found = []
        for ordinal in range(self._ask("cuDeviceGetCount")):
            other = self._ask("cuDeviceGet", ordinal)
            mine = ordinal == self.ordinal
            found.append(mine or bool(self._ask("cuDeviceCanAccessPeer", self._device, other)))
        return found

    def clear(self, address: int, nbytes: int) -> None:
        self._ask("cuMemsetD8Async", address, 0, nbytes, self._stream)

    def upload(self, address: int, data: NDArray[Any]) -> None:
        self._thread = threading.get_ident()
        if not self._recording:
            self._free_dropped()
        if data.nbytes > SLOT:
            self.upload_file(address, data.reshape(-1).view(np.uint8))
            return
        self._send(self._buffer(SLOT), address, data.ctypes.data, data.nbytes)

    def _send(self, buffer: tuple[int, Any], address: int, source: int, nbytes: int) -> None:
        slot, event = buffer
        self._ask("cuEventSynchronize", event)
        ctypes.memmove(slot, source, nbytes)
        self._ask("cuMemcpyHtoDAsync", address, slot, nbytes, self._stream)
        self._ask("cuEventRecord", event, self._stream)

    def upload_file(self, address: int, data: NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(data)
        for begin in range(0, data.nbytes, PAGE):
            nbytes = min(PAGE, data.nbytes - begin)
            self._send(self._buffer(PAGE), address + begin, data.ctypes.data + begin, nbytes)

    def gather(self, out: NDArray[np.uint8], places: Sequence[Rows]) -> None:
        at = out.ctypes.data
        for page, nbytes in in_pages(places):
            slot, event = self._buffer(PAGE)
            self._ask("cuEventSynchronize", event)
            for place, offset in page:
                self._copy_rows(slot + offset, place.address, place, place.nbytes, place.pitch)
            self._ask("cuEventRecord", event, self._stream)
            self._ask("cuEventSynchronize", event)
            ctypes.memmove(at, slot, nbytes)
            at += nbytes

    def scatter(self, places: Sequence[Rows], data: NDArray[np.uint8]) -> None:
        at = data.ctypes.data
        for page, nbytes in in_pages(places):
            slot, event = self._buffer(PAGE)
            self._ask("cuEventSynchronize", event)
            ctypes.memmove(slot, at, nbytes)
            for place, offset in page:
                self._copy_rows(place.address, slot + offset, place, place.pitch, place.nbytes)
            self._ask("cuEventRecord", event, self._stream)
            at += nbytes

    def _copy_rows(
        self, to: int, source: int, rows: Rows, to_pitch: int, source_pitch: int
    ) -> None:
        """Between the device and pinned memory. CUDA tells them apart by their addresses."""
        if rows.rows > 1 and max(to_pitch, source_pitch) <= _MAX_PITCH:
            kind = self._cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
            self._copy_2d(kind, (to, source), (to_pitch, source_pitch), rows.nbytes, rows.rows)
            return
        function = "cuMemcpyDtoHAsync" if source == rows.address else "cuMemcpyHtoDAsync"
        for row in range(rows.rows):
            at = to + row * to_pitch, source + row * source_pitch
            self._ask(function, *at, rows.nbytes, self._stream)

    def _copy_2d(
        self,
        kind: Any,
        addresses: tuple[int, int],
        pitches: tuple[int, int],
        nbytes: int,
        rows: int,
    ) -> None:
        """addresses, pitches: of the destination and of the source."""
        told = self._cu.CUDA_MEMCPY2D()
        told.srcMemoryType = told.dstMemoryType = kind
        told.dstDevice, told.srcDevice = addresses
        told.dstPitch, told.srcPitch = pitches
        told.WidthInBytes, told.Height = nbytes, rows
        self._ask("cuMemcpy2DAsync", told, self._stream)

    def download(self, array: NDArray[Any], address: int) -> None:
        self._ask("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self._stream)
        self.synchronise()

    def download_later(self, nbytes: int, address: int) -> Any:
        slot, event = self._buffer(LATER)
        self._ask("cuMemcpyDtoHAsync", slot, address, nbytes, self._stream)
        self._ask("cuEventRecord", event, self._stream)
        return slot, event, nbytes

    def wait(self, later: Any) -> NDArray[np.uint8]:
        slot, event, nbytes = later
        self._ask("cuEventSynchronize", event)
        return np.frombuffer(ctypes.string_at(slot, nbytes), np.uint8)

    def copy(
        self, destination: int, source: int, nbytes: int, rows: int = 1, pitch: int = 0
    ) -> None:
        if rows == 1 or pitch > _MAX_PITCH:
            for at in range(0, rows * pitch, pitch) if rows > 1 else (0,):
                self._ask("cuMemcpyDtoDAsync", destination + at, source + at, nbytes, self._stream)
            return
        kind = self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._copy_2d(kind, (destination, source), (pitch, pitch), nbytes, rows)

    # -- launches ----------------------------------------------------------------------------------
    def load(self, names: Sequence[str] = ()) -> None:
        """Load kernels now; all of them if none are named."""
        for name in names or self._compiled:
            self._function(name)

    def _function(self, name: str) -> tuple[Any, Compiled, tuple[Any, ...], Any]:
        """The kernel, what is known of it, types of its arguments, and how it is launched beside
        the one in front, if it may be."""
        if name not in self._loaded:
            if name not in self._compiled:
                raise EngineFault(
                    "gpu_kernels", f"the GPU kernel {name} is not compiled: `make gpu-kernels`"
                )
            compiled = self._compiled[name]
            module = self._ask("cuModuleLoadData", compiled.code + b"\0")
            self._modules.append(module)
            function = self._ask("cuModuleGetFunction", module, compiled.symbol.encode())
            if compiled.shared > _STATIC_SHARED:
                attribute = (
                    self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                )
                self._ask("cuFuncSetAttribute", function, attribute, compiled.shared)
            types: tuple[Any, ...] = ()
            for kind in compiled.kinds:
                types += (
                    TensorMaps.TYPES
                    if kind.endswith("]")
                    else (_C_TYPES.get(kind, ctypes.c_void_p),)
                )
            types += (ctypes.c_void_p,) * compiled.hidden
            config = self._config(compiled) if compiled.dependent else None
            self._loaded[name] = function, compiled, types, config
        found: tuple[Any, Compiled, tuple[Any, ...], Any] = self._loaded[name]
        return found

    def _config(self, compiled: Compiled) -> Any:
        """Return how a kernel is launched that need not wait for the end of the one in front."""
        cu = self._cu
        config = cu.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = compiled.threads, 1, 1
        config.sharedMemBytes, config.hStream = compiled.shared, self._stream
        attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        function, compiled, types, config = self._function(kernel)
        if compiled.boxes:
            arguments = self._maps.flat(arguments, compiled.boxes)
        values = (*arguments, *(0,) * compiled.hidden)
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        if config is not None and self.dependent_launch and self._behind_kernel:
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            self._ask("cuLaunchKernelEx", config, function, (values, types), 0)
        else:
            self._ask(
                "cuLaunchKernel",
                function,
                x,
                y,
                z,
                compiled.threads,
                1,
                1,
                compiled.shared,
                self._stream,
                (values, types),
                0,
            )
        self._behind_kernel = True

    def begin_recording(self) -> None:
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._ask("cuStreamBeginCapture", self._stream, mode)
        self._recording = True

    def end_recording(self) -> Graph:
        self._recording = False
        graph = self._ask("cuStreamEndCapture", self._stream)
        try:
            ready = self._ask("cuGraphInstantiate", graph, 0)
        finally:
            self._ask("cuGraphDestroy", graph)
        self._graphs.append(ready)
        return ready

    def replay(self, graph: Graph) -> None:
        self._ask("cuGraphLaunch", graph, self._stream)

    def forget(self, graph: Graph) -> None:
        self.synchronise()
        self._ask("cuGraphExecDestroy", graph)
        self._graphs.remove(graph)

    def synchronise(self) -> None:
        self._ask("cuStreamSynchronize", self._stream)
