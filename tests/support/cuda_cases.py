"""Cases of test_cuda_driver.py, each in a process of its own: `python -m support.cuda_cases CASE MANIFEST`.

The manifest is of kernels that do nothing: add (x, n, f), large, of 64 KB of shared memory, waits, which
may begin beside the one in front, and boxes; of a plane.
LD_LIBRARY_PATH leads to the stub; `CudaDriver` and cuda-bindings are the real ones.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.gpu import cuda_driver
from pageturner.kernels.gpu.arrays import Arena
from pageturner.kernels.gpu.catalogue import EXCHANGE_PROGRAMS, exchange_bytes, kernels_of
from pageturner.kernels.gpu.cuda_driver import PAGE, SLOT, SLOTS, CudaDriver
from pageturner.kernels.gpu.driver import LATER, Plane, Rows
from pageturner.kernels.gpu.exchange import DeviceExchange
from pageturner.kernels.gpu.manifest import Box, Manifest
from pageturner.kernels.gpu.tensor_maps import MAX_KEPT, TensorMap, TensorMaps
from support.stub_cuda import CONTEXT, EVENT, MEMORY, PEER, PINNED, READY, Stub

KERNELS: dict[str, dict[str, Any]] = {
    "add": {"arguments": [["x", "*fp32"], ["n", "i32"], ["f", "fp32"]]},
    "large": {"arguments": [["x", "*fp32"]], "shared": 64 << 10, "hidden": 0},
    "waits": {"arguments": [["x", "*fp32"]], "dependent": True},
    "boxes": {
        "arguments": [["x", "bf16[128,64]"], ["n", "i32"]],
        "dependent": True,
        "boxes": [[128, 64, 9, 2, 3]],
    },
}
EXCHANGES = ("all_reduce", "all_reduce_twice", "gather")
KERNELS |= {
    name: {"arguments": kernels_of(90)[name].arguments, "warps": kernels_of(90)[name].warps}
    for name in EXCHANGES
}
DICE = np.random.default_rng(5)


def some(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return DICE.integers(0, 256, nbytes).astype(np.uint8)


def fault(work: Callable[[], object]) -> EngineFault:
    try:
        work()
    except EngineFault as found:
        return found
    raise AssertionError("nothing was raised")


def code(work: Callable[[], object]) -> str:
    return fault(work).code


def held(driver: CudaDriver, nbytes: int, address: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = np.empty(nbytes, np.uint8)
    driver.download(found, address)
    return found


def end(driver: CudaDriver, stub: Stub) -> None:
    """Nothing was refused, and nothing is left."""
    driver.close()
    driver.close()
    assert stub.refused == []
    assert set(stub.held().values()) == {0}, stub.held()


def memory_and_copies(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    free, total = driver.memory()
    assert (free, total) == (1 << 30, 1 << 30)
    a, b = driver.alloc(1 << 20), driver.alloc(0)
    assert driver.memory()[0] == free - (1 << 20) - 1
    driver.clear(a, 1 << 20)
    assert not held(driver, 1 << 20, a).any()
    data = some(4096)
    driver.upload(a, data)
    driver.copy(a + 8192, a, 4096)
    driver.copy(a + 16384, a, 100, rows=5, pitch=512)
    found = held(driver, 4096 + 16384, a)
    assert (found[8192:12288] == data).all()
    rows = found[16384:].reshape(8, 512)[:5]
    assert (rows[:, :100] == data[: 5 * 512].reshape(5, 512)[:, :100]).all()
    assert not rows[:, 100:].any()
    driver.upload(a, np.zeros(0, np.float32))
    driver.free(b)
    driver.free(a)
    assert driver.memory()[0] == free
    driver.alloc(1000)  # nobody gives it back but close
    end(driver, stub)


def rows_far_apart(manifest: Manifest) -> None:
    """A layer of KV may be larger than the pitch that a copy in two dimensions may have."""
    stub, driver = Stub(), CudaDriver(manifest)
    for pitch in ((1 << 31) - 256, (1 << 31) + 256):
        a = driver.alloc(3 * pitch)
        rows = [some(1000) for _ in range(3)]
        for i, row in enumerate(rows):
            driver.upload(a + i * pitch, row)
        driver.copy(a + 4096, a, 1000, rows=3, pitch=pitch)
        for i, row in enumerate(rows):
            assert (held(driver, 1000, a + 4096 + i * pitch) == row).all()
        driver.free(a)
    assert stub.calls("cuMemcpy2DAsync") == 1
    end(driver, stub)


def rows_to_the_host_and_back(manifest: Manifest) -> None:
    """Through two pinned buffers, which are smaller than a place, or hold several; pitches of any size."""
    stub, driver = Stub(), CudaDriver(manifest)
    cuda_driver.PAGE = 1 << 16
    for pitch in (1 << 18, (1 << 31) + 256):
        a = driver.alloc(3 * pitch + (1 << 18))
        places = [
            Rows(a + 4096, 1000, 3, pitch),
            Rows(a + 8192, 30000, 3, pitch),
            Rows(a + 65536, 150000, 2, pitch),
        ]
        rows = [some(nbytes * count) for _, nbytes, count, _ in places]
        data = np.concatenate(rows)
        given = data.copy()
        driver.scatter(places, given)
        given[:] = 0
        found = np.empty_like(data)
        driver.gather(found, places)
        assert (found == data).all()
        for (address, nbytes, _, _), row in zip(places, rows, strict=True):
            assert (held(driver, nbytes, address + pitch) == row[nbytes : 2 * nbytes]).all()
        driver.free(a)
    end(driver, stub)


def uploads(manifest: Manifest) -> None:
    """What is uploaded may be changed at once, be it small or large; more small ones than there are slots."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(64 << 20)
    pieces = [some(1000 + i) for i in range(3 * SLOTS)]
    for i, piece in enumerate(pieces):
        given = piece.copy()
        driver.upload(a + 2048 * i, given)
        given[:] = 0
    for i, piece in enumerate(pieces):
        assert (held(driver, len(piece), a + 2048 * i) == piece).all()
    for nbytes in (SLOT, SLOT + 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 12345):
        for way in (driver.upload, driver.upload_file):
            data = some(nbytes)
            given = data.copy()
            way(a, given)
            given[:] = 0
            assert (held(driver, nbytes, a) == data).all(), nbytes
    wide = DICE.random((512, 1024), np.float32)
    driver.upload(a, wide)
    assert (held(driver, wide.nbytes, a).view(np.float32) == wide.reshape(-1)).all()
    end(driver, stub)


def planes(manifest: Manifest) -> None:
    """A map is encoded once for each plane and box. Behind another kernel a launch has two attributes."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(64 * 128)
    for rows in (64, 64, 32):
        driver.launch("boxes", (4,), (Plane(a, rows, 64), 7))
    driver.launch("boxes", (2,), (Plane(a + 128, 63, 64), 8))
    assert stub.parameters("boxes") == (128, 4, 4, 8, 8, 4, 8, 8)
    assert stub.calls("cuTensorMapEncodeTiled") == 3
    driver.synchronise()
    assert stub.launches() == [
        ("boxes", (grid, 1, 1), 128, 0, (at, 0, 0, 0, 0, n, 0, 0))
        for grid, at, n in ((4, a, 7), (4, a, 7), (4, a, 7), (2, a + 128, 8))
    ]
    assert stub.besides() == 3, "the first has no kernel in front"
    driver.begin_recording()
    driver.launch("boxes", (4,), (Plane(a, 64, 64), 7))
    graph = driver.end_recording()
    driver.replay(graph)
    driver.synchronise()
    assert len(stub.launches()) == 5
    end(driver, stub)


def planes_that_cannot_be(manifest: Manifest) -> None:
    """Each is refused by the stub and told as a fault; maps are kept up to a number."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(1 << 20)
    box = Box(128, 64, 9, 2, 3)
    wrong = [
        (Plane(a + 8, 64, 64), box),
        (Plane(a, 64, 60), box),
        (Plane(a, 1 << 14, 64), box),
        (Plane(a, 0, 64), box),
        (Plane(a, 64, 64), Box(257, 64, 9, 2, 3)),
        (Plane(a, 64, 128), Box(128, 128, 9, 2, 3)),
        (Plane(a, 64, 64), Box(128, 4, 9, 2, 0)),
    ]
    for i, (plane, form) in enumerate(wrong):
        assert code(lambda plane=plane, form=form: driver._maps.of(plane, form)) == "gpu_fault", i
        assert len(stub.refused) == i + 1, i
    function, _, types, _ = driver._function("boxes")
    launch = driver._cu.cuLaunchKernel
    encoded = driver._maps.of(Plane(a, 64, 64), box)
    driver.free(a)  # which the second map is of; the first nobody encoded
    for other in (TensorMap(), encoded):
        values = ((other, 0, 0, 0, 0, 1, 0, 0), types)
        assert int(launch(function, 2, 1, 1, 128, 1, 1, 0, driver._stream, values, 0)[0])
    a = driver.alloc(1 << 20)
    maps, calls = TensorMaps(), stub.calls("cuTensorMapEncodeTiled")
    for rows in (*range(1, MAX_KEPT + 2), MAX_KEPT + 1, 1):
        maps.of(Plane(a, rows, 64), box)
    assert stub.calls("cuTensorMapEncodeTiled") == calls + MAX_KEPT + 2


def downloads_later(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    a, want = driver.alloc(LATER), []
    laters: list[Any] = []
    for turn in range(6):
        want.append(some(64 + turn))
        driver.upload(a, want[-1])
        laters.append(driver.download_later(64 + turn, a))
        if turn:
            syncs, waits = stub.calls("cuStreamSynchronize"), stub.waits()
            assert (driver.wait(laters[turn - 1]) == want[turn - 1]).all()
            assert (stub.calls("cuStreamSynchronize"), stub.waits()) == (syncs, waits + 1)
    whole = some(LATER)
    driver.upload(a, whole)
    assert (driver.wait(driver.download_later(LATER, a)) == whole).all()
    assert stub.held()[PINNED] == SLOTS + 2
    end(driver, stub)


def launches(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(256)
    driver.load()
    assert driver.architecture == 80
    assert stub.parameters("add") == (8, 4, 4, 8, 8)
    driver.launch("add", (3, 2), (a, -7, 1.5))
    driver.launch("add", (1,), (0, 2**31 - 1, np.float32(0.1)))
    driver.launch("add", (5, 0), (a, 1, 1.0))
    driver.launch("large", (1, 1, 65535), (a + 64,))
    assert stub.launches() == [], "nothing runs before somebody waits"
    driver.synchronise()
    third = int(np.float32(0.1).view(np.uint32))
    assert stub.launches() == [
        ("add", (3, 2, 1), 128, 0, (a, 2**32 - 7, 0x3FC00000, 0, 0)),
        ("add", (1, 1, 1), 128, 0, (0, 2**31 - 1, third, 0, 0)),
        ("large", (1, 1, 65535), 128, 64 << 10, (a + 64,)),
    ]
    assert "make gpu-kernels" in fault(lambda: driver.launch("other", (1,), ())).message
    try:
        driver.launch("add", (1,), (a, 1))
    except (TypeError, ValueError):
        pass
    else:
        raise AssertionError("too few arguments were taken")
    end(driver, stub)


def beside_the_last(manifest: Manifest) -> None:
    """Only a kernel that waits by itself begins early, and only behind a kernel: recorded or not, until
    that is switched off."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(256)
    driver.load()
    assert driver.dependent_launch

    def chain() -> None:
        driver.launch("add", (3,), (a, 1, 2.0))
        driver.launch("waits", (3, 2), (a,))
        driver.launch("waits", (5, 0), (a,))

    chain()
    driver.synchronise()
    assert (stub.calls("cuLaunchKernel"), stub.calls("cuLaunchKernelEx"), stub.besides()) == (
        1,
        1,
        1,
    )
    driver.begin_recording()
    chain()
    graph = driver.end_recording()
    driver.replay(graph)
    driver.replay(graph)
    driver.synchronise()
    assert stub.besides() == 3
    assert stub.launches()[-1] == ("waits", (3, 2, 1), 128, 0, (a, 0, 0))
    for before in (
        lambda: driver.copy(a + 64, a, 64),
        lambda: driver.replay(graph),
        driver.synchronise,
    ):
        before()
        driver.launch("waits", (1,), (a,))
    driver.synchronise()
    assert (stub.calls("cuLaunchKernelEx"), stub.besides()) == (2, 4)
    driver.dependent_launch = False
    chain()
    driver.synchronise()
    assert (stub.calls("cuLaunchKernelEx"), stub.besides(), len(stub.launches())) == (2, 4, 13)
    end(driver, stub)


def an_older_driver_waits_for_each(manifest: Manifest) -> None:
    """Its recordings would not keep what may begin beside the one in front."""
    stub, driver = Stub(), CudaDriver(manifest)
    driver.launch("waits", (1,), (driver.alloc(256),))
    driver.synchronise()
    assert (stub.calls("cuLaunchKernelEx"), len(stub.launches())) == (0, 1)
    end(driver, stub)


def graphs(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(1 << 16)
    driver.clear(a, 1 << 16)
    before = some(256)
    driver.upload(a, before)
    driver.begin_recording()
    driver.launch("add", (3,), (a, 1, 2.0))
    driver.copy(a + 4096, a, 256)
    graph = driver.end_recording()
    assert not held(driver, 256, a + 4096).any(), "a recording is not run while it is made"
    driver.replay(graph)
    driver.upload(a, some(256))
    driver.replay(graph)
    found = held(driver, 8192, a)
    assert (found[4096 : 4096 + 256] == found[:256]).all()
    assert len(stub.launches()) == 2
    driver.begin_recording()
    empty = driver.end_recording()
    driver.replay(empty)
    driver.forget(graph)
    assert stub.held()[READY] == 1
    end(driver, stub)


def a_recording_fails(manifest: Manifest) -> None:
    """What is not capturable spoils it, and the stream goes on."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(1 << 16)
    driver.begin_recording()
    driver.launch("add", (3,), (a, 1, 2.0))
    assert code(driver.synchronise) == "gpu_fault"
    assert code(driver.end_recording) == "gpu_fault"
    stub.fail("cuGraphInstantiate", 1, 2)
    driver.begin_recording()
    driver.launch("add", (3,), (a, 1, 2.0))
    assert code(driver.end_recording) == "gpu_memory"
    driver.launch("add", (3,), (a, 1, 2.0))
    driver.synchronise()
    assert len(stub.launches()) == 1
    assert len(stub.refused) == 1
    driver.close()
    assert set(stub.held().values()) == {0}


def another_thread(manifest: Manifest) -> None:
    """Made in one, used and closed in others."""
    stub, driver = Stub(), CudaDriver(manifest)
    wrong: list[BaseException] = []

    def use() -> None:
        try:
            a = driver.alloc(64)
            data = some(64)
            driver.upload(a, data)
            assert (held(driver, 64, a) == data).all()
        except BaseException as error:
            wrong.append(error)

    for work in (use, use, driver.close):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert wrong == []
    end(driver, stub)


def kept_beside_a_recording(manifest: Manifest) -> None:
    """Another thread keeps and drops while this one records: neither disturbs it, and all is given back."""
    stub, driver = Stub(), CudaDriver(manifest)
    free, a = driver.memory()[0], driver.alloc(64)
    data, kept = some((9 << 20) + 5), list[int]()
    driver.begin_recording()
    for work in (
        lambda: kept.append(driver.keep(data)),
        lambda: driver.drop(driver.keep(data[:100])),
    ):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    driver.launch("add", (1,), (a, 16, 1.0))
    driver.forget(driver.end_recording())
    assert (held(driver, data.nbytes, kept[0]) == data).all()
    driver.upload(a, some(8))  # frees what was dropped
    driver.drop(kept[0])
    assert driver.memory()[0] == free - 64
    driver.keep(data)  # nobody drops it but close
    end(driver, stub)


def beside_others(manifest: Manifest) -> None:
    """Two at once, and one after the other: the context of the process stays as long as anybody has it."""
    stub, first = Stub(), CudaDriver(manifest)
    second = CudaDriver(manifest)
    assert stub.held()[CONTEXT] == 2
    data, a = some(64), second.alloc(64)
    second.upload(a, data)
    first.close()
    assert (held(second, 64, a) == data).all()
    assert stub.held()[PINNED] == SLOTS
    end(second, stub)
    end(CudaDriver(manifest), stub)


def full_memory(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(1 << 29)
    full = fault(lambda: driver.alloc(1 << 30))
    assert full.code == "gpu_memory"
    assert "536,870,912 bytes are free" in full.message
    assert "lower --kv-cache-memory" in full.message
    driver.free(a)
    driver.alloc(1 << 30)
    stub.fail("cuMemHostAlloc", 1, 2)
    pinned = fault(lambda: driver.download_later(64, a))
    assert (pinned.code, "pinned" in pinned.message) == ("gpu_memory", True)
    end(driver, stub)
    for name in ("cuStreamCreate", "cuMemHostAlloc", "cuEventCreate"):
        stub.fail(name, 2 if name == "cuEventCreate" else 1, 2)
        assert code(lambda: CudaDriver(manifest)) == "gpu_memory"
        assert set(stub.held().values()) == {0}, "a start that fails takes nothing"


def a_kernel_faults(manifest: Manifest) -> None:
    """Of which the next wait tells, and every call after it."""
    stub, driver = Stub(), CudaDriver(manifest)
    a = driver.alloc(64)
    stub.fail("kernel", 2, 719)
    for _ in range(3):
        driver.launch("add", (1,), (a, 1, 1.0))
    found = fault(driver.synchronise)
    assert (found.code, "CUDA_ERROR_LAUNCH_FAILED" in found.message) == ("gpu_fault", True)
    assert code(lambda: driver.launch("add", (1,), (a, 1, 1.0))) == "gpu_fault"
    assert code(lambda: driver.alloc(64)) == "gpu_fault"
    assert code(lambda: driver.free(a)) == "gpu_fault"
    end(driver, stub)


def no_device(manifest: Manifest) -> None:
    found = fault(lambda: CudaDriver(manifest))
    assert (found.code, "CUDA_ERROR_NO_DEVICE" in found.message) == ("gpu_absent", True)


def too_few_devices(manifest: Manifest) -> None:
    assert code(lambda: CudaDriver(manifest, ordinal=1)) == "gpu_absent"


def old_driver(manifest: Manifest) -> None:
    found = fault(lambda: CudaDriver(manifest))
    assert (found.code, "CUDA 11.8" in found.message) == ("gpu_driver", True)


def older_driver(manifest: Manifest) -> None:
    """One in which cuda-bindings finds nothing."""
    found = fault(lambda: CudaDriver(manifest))
    assert (found.code, "too old" in found.message) == ("gpu_driver", True), found


def no_kernels(manifest: Manifest) -> None:
    found = fault(lambda: CudaDriver(manifest))
    assert (found.code, "7.5" in found.message) == ("gpu_kernels", True)


def ptx_that_is_too_new(manifest: Manifest) -> None:
    stub, driver = Stub(), CudaDriver(manifest)
    stub.fail("cuModuleLoadData", 1, 222)
    found = fault(driver.load)
    assert (found.code, "renew it" in found.message) == ("gpu_driver", True)
    end(driver, stub)


def a_driver_that_cannot_compile_ptx(manifest: Manifest) -> None:
    """Which is told before anything is loaded or taken."""
    stub, found = Stub(), fault(lambda: CudaDriver(manifest))
    assert (found.code, "CUDA 12.0, and 12.1 is needed" in found.message) == ("gpu_driver", True), (
        found
    )
    assert stub.calls("cuModuleLoadData") == stub.calls("cuDevicePrimaryCtxRetain") == 0


def a_call_that_is_absent(manifest: Manifest) -> None:
    """It is told as an old driver, and whatever else the package fails with is not."""
    driver = CudaDriver(manifest)
    found = fault(lambda: driver._ask("cuMemPrefetchAsync", 1, 1, driver._cu.CUmemLocation(), 0, 0))
    assert (found.code, "too old" in found.message) == ("gpu_driver", True)

    def other() -> None:
        raise RuntimeError("something else")

    driver._cu.other = other
    found = fault(lambda: driver._ask("other"))
    assert (found.code, found.message) == ("gpu_fault", "other failed: something else")


def compiled(manifest: Manifest) -> None:
    """Every kernel of a manifest that was compiled: its code has the parameters that the manifest tells, it
    may have its shared memory, and it is launched."""
    stub, driver = Stub(), CudaDriver(manifest)
    a, kernels = driver.alloc(4096), driver._compiled
    for name in kernels:
        driver.load([name])
        one = kernels[name]
        sizes = tuple(4 if kind in ("i32", "fp32") else 8 for kind in one.kinds) + (8,) * one.hidden
        assert stub.parameters(one.symbol) == sizes, name
        driver.launch(name, (2, 1, 1), [a if kind.startswith("*") else 1 for kind in one.kinds])
    driver.synchronise()
    assert len(stub.launches()) == len(kernels) > 0
    early = {name for name in kernels if kernels[name].dependent}
    for name in (*early, *early):  # the first time each was loaded in between
        driver.launch(
            name, (1,), [a if kind.startswith("*") else 1 for kind in kernels[name].kinds]
        )
    driver.synchronise()
    assert stub.besides() == max(2 * len(early) - 1, 0), "what waits by itself is launched so"
    assert ("qk_norm_rope_kv_write.fp8_e4m3.256" in early, "dense.bf16.m64_wide" in early) == (
        driver.architecture >= 90,
    ) * 2
    print(driver.architecture, driver.fingerprint, len(kernels))
    end(driver, stub)


def shared_memory(manifest: Manifest) -> None:
    """Two processes, each of which opens what the other one has."""
    stub, driver = Stub(), CudaDriver(manifest)
    assert driver.peers() == [True, True]
    address, handle = driver.alloc_shared(100)
    assert len(handle) == 64
    assert not held(driver, 100, address).any()
    again = [sys.executable, "-m", "support.cuda_cases", "opened", sys.argv[2], handle.hex()]
    done = subprocess.run(again, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    theirs = driver.open_shared(bytes.fromhex(done.stdout))
    driver.load()
    word = driver.host_word()
    assert ctypes.c_int32.from_address(word).value == 0
    driver.launch("add", (1,), (word, 1, 1.0))
    driver.synchronise()
    assert stub.held()[PEER] == 1
    assert theirs != address
    cu, small = driver._cu, driver.alloc(100)
    opened = cu.CUipcMemHandle()
    ctypes.memmove(opened.getPtr(), handle, len(handle))
    refused: list[Callable[[], Any]] = [
        lambda: cu.cuIpcOpenMemHandle(opened, 1),
        lambda: cu.cuIpcGetMemHandle(small),
        lambda: cu.cuIpcCloseMemHandle(address),
        lambda: cu.cuMemFree(theirs),
    ]
    for i, call in enumerate(refused):
        assert int(call()[0]), i
        assert len(stub.refused) == i + 1, i
    driver.close()
    assert set(stub.held().values()) == {0}, stub.held()


def exchanges(manifest: Manifest) -> None:
    """What sums and gathers ask for, recorded too, without another rank."""
    stub, driver = Stub(), CudaDriver(manifest)
    arena = Arena(driver, 64 << 20)
    mine = DeviceExchange(driver, arena, 1, 4, area=1 << 14)
    mine.starts = (0, 64, 128, 192, 260)
    regions = [driver.alloc(exchange_bytes(1 << 14)) for _ in range(4)]
    mine.open([b""] * 4, dict(enumerate(regions)))
    x = arena.take((40, 4096))
    driver.begin_recording()
    mine.sum(x)
    driver.replay(driver.end_recording())
    mine.sum(x.rows(slice(0, 1)), x)
    mine.gather(arena.take((3, 64)), x)
    driver.synchronise()
    ran = stub.launches()
    assert [one[0] for one in ran] == ["all_reduce_twice", "all_reduce", "gather"]
    assert [one[1] for one in ran] == [(EXCHANGE_PROGRAMS, 1, 1), (4, 1, 1), (1, 1, 1)]
    assert not mine.lost
    mine.stop()
    assert mine.lost
    end(driver, stub)


def opened(manifest: Manifest) -> None:
    """The other process of `shared_memory`, on the other device; it ends first."""
    stub, driver = Stub(), CudaDriver(manifest, ordinal=1)
    handle = bytes.fromhex(sys.argv[3])
    sys.stdout.write(driver.alloc_shared(5 << 20)[1].hex())
    driver.open_shared(handle)
    end(driver, stub)


def the_stub_is_strict(manifest: Manifest) -> None:
    """Each of these is refused: a stub that takes everything proves nothing."""
    stub, driver = Stub(), CudaDriver(manifest)
    cu, stream = driver._cu, driver._stream
    a = driver.alloc(256)
    driver.load()
    add, types = driver._loaded["add"][0], driver._loaded["add"][2]
    pinned = driver._pinned(4096)[0]

    def launch(grid: int = 1, block: int = 128, shared: int = 0, at: int = a) -> tuple[Any, ...]:
        given = ((at, 1, 1.0, 0, 0), types)
        return cu.cuLaunchKernel(add, grid, 1, 1, block, 1, 1, shared, stream, given, 0)  # type: ignore[no-any-return]

    def beside(name: str = "waits", attribute: int = 6, count: int = 1) -> Any:
        function, compiled, kinds, _ = driver._function(name)
        config = driver._config(compiled)
        given, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        given.id, given.value = cu.CUlaunchAttributeID(attribute), value
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.attrs, config.numAttrs = [given], count
        return cu.cuLaunchKernelEx(
            config, function, ((a, 0, 0) if name == "waits" else (a, 1, 1.0, 0, 0), kinds), 0
        )

    def elsewhere() -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(cu.cuMemAlloc(64)))
        thread.start()
        thread.join()
        return found[0]

    def under_way() -> Any:
        cu.cuMemcpyHtoDAsync(a, pinned, 64, stream)
        return cu.cuMemFreeHost(pinned)

    refused: list[Callable[[], Any]] = [
        lambda: cu.cuMemFree(a + 1),
        lambda: cu.cuMemFree(pinned),
        lambda: cu.cuMemAlloc(0),
        under_way,
        lambda: cu.cuMemcpyHtoDAsync(a + 200, pinned, 64, stream),
        lambda: cu.cuMemcpyDtoDAsync(a, pinned, 64, stream),
        lambda: cu.cuMemsetD8Async(a, 0, 257, stream),
        lambda: launch(grid=0),
        lambda: launch(block=64),
        lambda: launch(shared=50000),
        lambda: launch(at=pinned),
        lambda: beside("add"),
        lambda: beside(attribute=2),
        lambda: beside(count=0),
        lambda: cu.cuLaunchKernel(
            add, 1, 70000, 1, 128, 1, 1, 0, stream, ((a, 1, 1.0, 0, 0), types), 0
        ),
        lambda: cu.cuFuncSetAttribute(add, 8, 228 << 10),
        elsewhere,
        lambda: cu.cuModuleGetFunction(driver._modules[0], b"other"),
        lambda: cu.cuModuleLoadData(b"what\0"),
        lambda: cu.cuStreamSynchronize(12345),
        lambda: cu.cuEventSynchronize(12345),
        lambda: cu.cuGraphLaunch(1, stream),
        lambda: cu.cuStreamEndCapture(stream),
    ]
    for i, call in enumerate(refused):
        assert int(call()[0]), i
        assert len(stub.refused) == i + 1, i
    assert int(beside()[0]) != 0, "there is no kernel in front of it"
    launch()
    assert int(beside()[0]) == 0
    event = driver._pinned(64)[1]
    driver.synchronise()
    driver.begin_recording()
    assert int(cu.cuEventRecord(event, stream)[0]) == 0
    assert int(cu.cuEventSynchronize(event)[0]) == 907
    assert int(cu.cuMemAlloc(64)[0]) == 0, "a relaxed capture lets memory be taken"
    assert int(cu.cuMemcpyDtoHAsync(np.empty(8, np.uint8).ctypes.data, a, 8, stream)[0]) == 900
    assert int(cu.cuStreamEndCapture(stream)[0]) == 901
    driver.begin_recording()
    launch()
    graph = driver.end_recording()
    driver.free(a)
    assert int(cu.cuGraphLaunch(graph, stream)[0]) == 1
    assert {stub.held()[MEMORY], stub.held()[EVENT] - SLOTS} == {1, 2}


if __name__ == "__main__":
    globals()[sys.argv[1]](Manifest(Path(sys.argv[2])))
