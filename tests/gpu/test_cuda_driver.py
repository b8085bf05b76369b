"""`CudaDriver` and cuda-bindings as they are, on a stub of the driver library: no call is refused, nothing is
left. Each case of support/cuda_cases.py has a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pageturner.kernels.gpu.catalogue import ARCHITECTURES, kernels_of
from support import stub_cuda

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is absent: pip install --group gpu-build", allow_module_level=True)

from support import cuda_cases, cuda_models

ROOT = Path(__file__).parents[2]
OLDER = "int cuInit(unsigned flags) { return flags ? 1 : 0; }"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_cuda.build(tmp_path_factory.mktemp("stub"))


def run(
    module: str, case: str, manifest: Path, library: Path, *rest: str, **settings: object
) -> str:
    """In a process that finds the stub where others find the driver. What it told on stdout."""
    told = {f"STUB_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    surroundings = os.environ | told | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": path}
    command = [sys.executable, "-m", f"support.{module}", case, str(manifest), *rest]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("memory_and_copies", {}),
        ("kept_beside_a_recording", {}),
        ("rows_far_apart", {"memory": 16 << 30}),
        ("rows_to_the_host_and_back", {"memory": 16 << 30}),
        ("uploads", {}),
        ("downloads_later", {}),
        ("launches", {}),
        ("beside_the_last", {}),
        ("an_older_driver_waits_for_each", {"version": 12020}),
        ("planes", {}),
        ("planes_that_cannot_be", {}),
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
        ("a_driver_that_cannot_compile_ptx", {"version": 12000}),
        ("a_call_that_is_absent", {}),
        ("shared_memory", {"devices": 2, "peers": 1}),
        ("exchanges", {}),
        ("the_stub_is_strict", {}),
    ],
)
def test_case(case: str, settings: dict[str, int], library: Path, tmp_path: Path) -> None:
    stub_cuda.write_manifest(tmp_path, cuda_cases.KERNELS)
    run("cuda_cases", case, tmp_path, library, **settings)


def test_a_library_in_which_nothing_is_found(tmp_path: Path) -> None:
    stub_cuda.write_manifest(tmp_path, cuda_cases.KERNELS)
    run("cuda_cases", "older_driver", tmp_path, stub_cuda.build(tmp_path, OLDER))


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of every kernel, with the arguments, warps and shared memory of the real ones."""
    recorded = json.loads((ROOT / "bench/gpu/resources.json").read_text())["80"]
    kernels = {
        name: {
            "arguments": one.arguments,
            "warps": one.warps,
            "shared": recorded.get(name, (0, 0, 0))[2],
        }
        for name, one in kernels_of(80).items()
    }
    return stub_cuda.write_manifest(tmp_path_factory.mktemp("kernels"), kernels)


@pytest.mark.parametrize("case", ["plain", "ahead"])
def test_an_engine_asks_for_nothing_wrong_and_waits_for_tokens_only(
    case: str, library: Path, catalogue: Path
) -> None:
    run("cuda_engine", case, catalogue, library, capability=80)


USED = (  # by the tiny model of cuda_engine.py
    "embed.fp32",
    "head_norm.fp32",
    "dense.fp32.m64",
    "qk_norm_rope_kv_write.float16.64",
    "attend.float16.64.few.fp32",
    "gated.silu.fp32",
    "take_rows",
    "sample.best.cuts",
    "sample.collect",
    "sample.cut",
    "sample.draw",
)
COMPILE = """
import sys
from pathlib import Path
import compile_judge, compile_kernels
found = {}
for architecture in compile_kernels.ARCHITECTURES:
    kernels = compile_kernels.kernels_of(architecture)
    wanted = [name for name in kernels if compile_judge.is_sample(name)]
    wanted += sys.argv[2].split(",") if architecture == 90 else []
    found[architecture] = {name: compile_kernels.compile_one(architecture, kernels[name]) for name in wanted}
compile_kernels.write(Path(sys.argv[1]), found)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample of test_compiled.py for every architecture, and for sm_90 what the tiny model uses."""
    pytest.importorskip("triton", reason="triton is absent: pip install --group gpu-build")
    out = tmp_path_factory.mktemp("compiled")
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench/gpu"), str(ROOT / "src")])
    subprocess.run(
        [sys.executable, "-c", COMPILE, out, ",".join(USED)], check=True, env=surroundings
    )
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_kernels_have_the_parameters_of_their_manifest(
    library: Path, compiled: Path
) -> None:
    for capability in (*ARCHITECTURES, 87, 103, 121):
        told = run("cuda_cases", "compiled", compiled, library, capability=capability).split()
        portable = capability == 103
        expected = {87: 86, 103: 80, 121: 120}.get(capability, capability)
        assert (told[0], told[1].endswith("-ptx")) == (str(expected), portable)
    for case in ("plain", "ahead"):
        told = run("cuda_engine", case, compiled, library, capability=90).split()
        assert sorted(told) == sorted(USED)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_of_many_kinds_from_start_to_end(library: Path, catalogue: Path) -> None:
    told = run("cuda_models", "all", catalogue, library, capability=80)
    assert len(told.splitlines()) == len(cuda_models.MODELS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part", ["bits", "decode", "idle", "batch32", "invariance", "kinds", "pdl", "ranks"]
)
def test_what_is_to_run_on_a_device_asks_it_for_nothing_wrong(
    part: str, library: Path, catalogue: Path
) -> None:
    pytest.importorskip("triton", reason="triton is absent: pip install --group gpu-build")
    run("cuda_bench", part, catalogue, library, capability=80)
