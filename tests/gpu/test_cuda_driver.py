"""`CudaDriver` and cuda-bindings as they are, on a stub of the driver library: no call is refused, nothing is
left. Each case of support/cuda_cases.py has a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import stub_cuda

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is absent: pip install --group gpu-build", allow_module_level=True)

from support import cuda_cases

ROOT = Path(__file__).parents[2]
OLDER = "int cuInit(unsigned flags) { return flags ? 1 : 0; }"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_cuda.build(tmp_path_factory.mktemp("stub"))


def run(module: str, case: str, manifest: Path, library: Path, *rest: str, **settings: object) -> str:
    """In a process that finds the stub where others find the driver. What it told on stdout."""
    told = {f"STUB_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    surroundings = os.environ | told | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": path}
    command = [sys.executable, "-m", f"support.{module}", case, str(manifest), *rest]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("memory_and_copies", {}),
        ("uploads", {}),
        ("downloads_later", {}),
        ("launches", {}),
        ("graphs", {}),
        ("a_recording_fails", {}),
        ("another_thread", {}),
        ("beside_others", {}),
        ("full_memory", {}),
        ("a_kernel_faults", {}),
        ("no_device", {"devices": 0}),
        ("too_few_devices", {"devices": 1}),
        ("old_driver", {"version": 11080}),
        ("no_kernels", {"capability": 75}),
        ("ptx_that_is_too_new", {}),
        ("a_call_that_is_absent", {}),
        ("the_stub_is_strict", {}),
    ],
)
def test_case(case: str, settings: dict[str, int], library: Path, tmp_path: Path) -> None:
    stub_cuda.write_manifest(tmp_path, cuda_cases.KERNELS)
    run("cuda_cases", case, tmp_path, library, **settings)


def test_a_library_in_which_nothing_is_found(tmp_path: Path) -> None:
    stub_cuda.write_manifest(tmp_path, cuda_cases.KERNELS)
    run("cuda_cases", "older_driver", tmp_path, stub_cuda.build(tmp_path, OLDER))
