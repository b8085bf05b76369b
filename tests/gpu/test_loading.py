"""The manifest of compiled kernels and the driver above CUDA: what is chosen, and what is refused how."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import devices
from pageturner.errors import EngineFault
from pageturner.kernels.gpu import cuda_driver, steps
from pageturner.kernels.gpu.arrays import Arena
from pageturner.kernels.gpu.catalogue import ARCHITECTURES, SHARED, kernels_of, parts_of
from pageturner.kernels.gpu.cuda_driver import SLICE, SLOT, CudaDriver
from pageturner.kernels.gpu.manifest import Manifest


def write(folder: Path, architectures: tuple[int, ...], portable: bool = False) -> Path:
    """A manifest with one kernel for each architecture."""
    packed = zlib.compress(b"code")
    (folder / "k.bin").write_bytes(packed)
    digest = hashlib.sha256(packed).hexdigest()[:32]
    entry = {
        "symbol": "add",
        "arguments": [["x", "*fp32"], ["n", "i32"]],
        "hidden": 2,
        "dependent": False,
        "shared": 0,
        "warps": 4,
        "at": 0,
        "bytes": len(packed),
        "sha256": digest,
    }
    part = {"file": "k.bin", "kernels": {"add": entry}}
    told: dict[str, Any] = {
        "source": "0123456789abcdef",
        "architectures": {str(a): part for a in architectures},
    }
    if portable:
        told["portable"] = part
    (folder / "manifest.json").write_text(json.dumps(told))
    return folder


class FakeCuda:
    """As much of cuda.bindings.driver as a start asks for; `results` by the name of a call."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=2,
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, capability: tuple[int, int] = (9, 0), **results: Any) -> None:
        self.capability = capability
        self.results = {
            "cuDriverGetVersion": 13000,
            "cuDeviceGetCount": 1,
            "cuDeviceGet": 0,
            "cuDeviceGetName": b"Fake\0\0",
            "cuMemHostAlloc": 4096,
            "cuEventCreate": 1,
            "cuMemGetInfo": (100, 1000),
            "cuMemAlloc": 256,
            **results,
        }
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name == "cuDeviceGetAttribute":
                return 0, (*self.capability, 132)[arguments[0]]
            found = self.results.get(name, 1)
            if isinstance(found, Exception):
                raise found
            if isinstance(found, Error):
                return (found,)
            return (0, *found) if isinstance(found, tuple) else (0, found)

        call.__name__ = name
        return call


class Error(int):
    """A result of CUDA's that is none of success."""

    name: str


def error(name: str) -> Error:
    found = Error(2)
    found.name = name
    return found


def code_of(
    *, capability: tuple[int, int] = (9, 0), manifest: Manifest, **results: Any
) -> tuple[str, str]:
    with pytest.raises(EngineFault) as told:
        CudaDriver(manifest, bindings=FakeCuda(capability, **results))
    return told.value.code, told.value.message


def test_each_device_gets_the_kernels_that_run_on_it(tmp_path: Path) -> None:
    manifest = Manifest(write(tmp_path, (80, 86, 90, 120), portable=True))
    assert manifest.choose(90) == (90, False)
    assert manifest.choose(89) == (86, False)
    assert manifest.choose(87) == (86, False)
    assert manifest.choose(121) == (120, False)
    assert manifest.choose(103) == (80, True)
    with pytest.raises(EngineFault, match=r"7\.5.*--device cpu") as told:
        manifest.choose(75)
    assert told.value.code == "gpu_kernels"


def test_missing_and_damaged_kernels_are_told(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="make gpu-kernels"):
        Manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[")
    with pytest.raises(EngineFault, match="damaged"):
        Manifest(tmp_path)
    write(tmp_path, (90,))
    assert Manifest(tmp_path).kernels(90)["add"].code == b"code"
    (tmp_path / "k.bin").write_bytes(b"other bytes")
    with pytest.raises(EngineFault, match="add is damaged"):
        Manifest(tmp_path).kernels(90)["add"]


def test_what_a_device_lacks_is_told_with_advice(tmp_path: Path) -> None:
    manifest = Manifest(write(tmp_path, (90,)))
    absent = error("CUDA_ERROR_NO_DEVICE")
    assert code_of(manifest=manifest, cuInit=absent)[0] == "gpu_absent"
    assert code_of(manifest=manifest, cuDeviceGetCount=0)[0] == "gpu_absent"
    no_library = RuntimeError('"cuda" is an NVIDIA driver library and cannot be found')
    code, message = code_of(manifest=manifest, cuInit=no_library)
    assert (code, "NVIDIA driver" in message) == ("gpu_absent", True)
    code, message = code_of(manifest=manifest, cuDriverGetVersion=11080)
    assert (code, "11.8" in message) == ("gpu_driver", True)
    assert code_of(manifest=manifest, capability=(7, 5))[0] == "gpu_kernels"


@pytest.mark.parametrize("here", [True, False])
def test_without_the_package_the_advice_is_for_this_machine(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(cuda_driver, "nvidia_is_here", lambda: here)
    with pytest.raises(EngineFault) as told:
        cuda_driver.CudaDriver()
    assert told.value.code == "gpu_absent"
    assert f"{sys.executable} -m pip install 'pageturner[gpu]'" in told.value.message
    assert ("shows no NVIDIA GPU" in told.value.message) is not here


def test_full_memory_and_faults_are_told(tmp_path: Path) -> None:
    manifest = Manifest(write(tmp_path, (90,)))
    full = CudaDriver(manifest, bindings=FakeCuda(cuMemAlloc=error("CUDA_ERROR_OUT_OF_MEMORY")))
    with pytest.raises(EngineFault, match="lower --kv-cache-memory") as told:
        full.alloc(1 << 40)
    assert told.value.code == "gpu_memory"
    faulty = CudaDriver(
        manifest, bindings=FakeCuda(cuStreamSynchronize=error("CUDA_ERROR_ILLEGAL_ADDRESS"))
    )
    with pytest.raises(EngineFault, match="ILLEGAL_ADDRESS") as told:
        faulty.synchronise()
    assert told.value.code == "gpu_fault"


def test_a_launch_loads_its_kernel_once(tmp_path: Path) -> None:
    cuda = FakeCuda()
    driver = CudaDriver(Manifest(write(tmp_path, (90,))), bindings=cuda)
    assert "cuModuleLoadData" not in cuda.calls, "a start does nothing for each kernel"
    assert driver.manifest_s > 0
    for _ in range(3):
        driver.launch("add", (4,), (256, 7))
    driver.launch("add", (0,), (256, 7))
    assert (cuda.calls.count("cuModuleLoadData"), cuda.calls.count("cuLaunchKernel")) == (1, 3)
    with pytest.raises(EngineFault, match="not compiled"):
        driver.launch("other", (1,), ())


def test_what_is_kept_is_uploaded_beside_the_steps_and_freed_behind_them(tmp_path: Path) -> None:
    """By a thread of its own; nobody waits for a stream that is recorded."""
    pinned = np.zeros(SLOT, np.uint8)
    cuda = FakeCuda(cuMemAlloc=4096, cuMemHostAlloc=pinned.ctypes.data)
    driver = CudaDriver(Manifest(write(tmp_path, (90,))), bindings=cuda)

    def calls_of(work: Callable[..., object], *arguments: object, apart: bool = False) -> list[str]:
        cuda.calls.clear()
        if apart:
            thread = threading.Thread(target=work, args=arguments)
            thread.start()
            thread.join()
        else:
            work(*arguments)
        return list(cuda.calls)

    data = np.zeros(SLICE + 1, np.uint8)
    once = ["cuMemcpyHtoDAsync", "cuStreamSynchronize"]
    first = calls_of(driver.keep, data, apart=True)
    assert first == ["cuCtxSetCurrent", "cuStreamCreate", "cuMemAlloc", *once, *once]
    freed = ["cuStreamSynchronize", "cuMemFree"]
    assert calls_of(driver.drop, 4096) == freed
    assert calls_of(driver.drop, 4096) == [], "once"
    assert calls_of(driver.keep, data, apart=True) == [
        "cuCtxSetCurrent",
        "cuMemAlloc",
        *once,
        *once,
    ]
    assert calls_of(driver.drop, 4096, apart=True) == []
    assert calls_of(driver.upload, 256, np.zeros(4, np.uint8))[:2] == freed
    driver.keep(data)
    driver.close()
    assert calls_of(driver.drop, 4096) == []


def test_nothing_is_freed_while_a_step_is_recorded(tmp_path: Path) -> None:
    pinned = np.zeros(SLOT, np.uint8)
    cuda = FakeCuda(cuMemHostAlloc=pinned.ctypes.data)
    driver = CudaDriver(Manifest(write(tmp_path, (90,))), bindings=cuda)
    address = driver.keep(np.zeros(4, np.uint8))
    driver.begin_recording()
    driver.drop(address)
    assert "cuMemFree" not in cuda.calls
    driver.end_recording()
    for _ in range(2):
        driver.upload(256, np.zeros(4, np.uint8))
    assert cuda.calls.count("cuMemFree") == 1


def test_cuda_that_is_asked_for_and_absent_is_an_error_and_auto_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> None:
        raise EngineFault("gpu_absent", "no CUDA device can be used here")

    def never() -> devices.ModelNeeds:
        raise AssertionError("the model is not looked at where there is no device")

    monkeypatch.setattr("pageturner.kernels.gpu.cuda_driver._bindings", absent)
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    found = devices.choose(EngineConfig(device="auto"), never)
    assert (found.ops, found.reason) == (None, "no CUDA device can be used here")
    assert devices.choose(EngineConfig(device="cpu"), never).ops is None
    with pytest.raises(EngineFault) as told:
        devices.choose(EngineConfig(device="cuda"), never)
    assert told.value.code == "gpu_absent"


def test_kv_is_sized_by_the_memory_of_its_device() -> None:
    assert devices.kv_bytes(object(), EngineConfig(), 500) == (0, 500)
    device = SimpleNamespace(free_for_kv=lambda: 1000)
    assert devices.kv_bytes(device, EngineConfig(), 500) == (900, 1000)
    half = EngineConfig(gpu_memory_utilization=0.5)
    assert devices.kv_bytes(device, half, 500) == (500, 1000)
    assert devices.kv_bytes(device, EngineConfig(kv_cache_memory=70), 500) == (70, 1000)


# -- plain arithmetic ----------------------------------------------------------------------------------------
def test_parts_of_k_cover_it_and_know_no_rows() -> None:
    for rows, columns in (
        (1, 16),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (128256, 4096),
        (70, 96),
    ):
        for step in (16, 32, 64, 128):
            chunk, parts = parts_of(rows, columns, step)
            assert chunk % step == 0
            assert (parts - 1) * chunk < columns <= parts * chunk


def test_steps_are_padded_to_few_sizes() -> None:
    sizes = {steps.bucket(count) for count in range(1, 257)}
    assert len(sizes) <= 24
    assert all(steps.bucket(count) >= count for count in range(1, 600))


def test_every_kernel_is_named_for_every_architecture_but_what_only_sm_90_has() -> None:
    names = {architecture: set(kernels_of(architecture)) for architecture in ARCHITECTURES}
    assert all(one == names[80] for architecture, one in names.items() if architecture != 90)
    more = names[90] - names[80]
    assert names[80] < names[90]
    assert all("persistent" in name or name.endswith(".m16") for name in more)


def test_what_is_recorded_of_kernels_fits_the_devices_they_run_on() -> None:
    recorded = json.loads((Path(__file__).parents[2] / "bench/gpu/resources.json").read_text())
    for architecture, kernels in recorded.items():
        most = SHARED[int(architecture)]
        assert set(kernels) == set(kernels_of(int(architecture)))
        assert {name for name, (_, _, shared) in kernels.items() if shared > most} == set()


def test_no_kernel_spills_much() -> None:
    """Where a kernel spills is told by bench/gpu/spills.py: on sm_90, which has run, nowhere in a loop over K
    or over positions. What is most stands behind the loop of the widest tile."""
    recorded = json.loads((Path(__file__).parents[2] / "bench/gpu/resources.json").read_text())
    spilled = [row[1] for kernels in recorded.values() for row in kernels.values()]
    assert max(spilled) <= 1000


def test_an_arena_gives_the_same_addresses_again_and_refuses_too_much() -> None:
    driver = SimpleNamespace(alloc=lambda nbytes: 4096, clear=lambda *_: None)
    arena = Arena(driver, 1024)  # type: ignore[arg-type]
    first = [arena.take((3, 5)).address for _ in range(2)]
    arena.reset()
    assert [arena.take((3, 5)).address for _ in range(2)] == first
    with pytest.raises(EngineFault, match="--max-num-batched-tokens"):
        arena.take((1000,))
