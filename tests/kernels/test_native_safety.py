"""What callers can do wrong with the native backend, and what it does where it cannot run."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from grid import batch, i32, kv_spec, normal, vector, weight

from pageturner.kernels.base import AttentionShape, KVSpec, Tensor
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas, supported
from support.refusals import engine_fault

built = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(2)


@built
def test_threads_follow_the_cores_this_process_may_use() -> None:
    assert NativeOps().threads == len(os.sched_getaffinity(0))
    assert NativeOps(3).threads == 3


@built
def test_instruction_set_by_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_ISA", "portable")
    assert NativeOps(1).isa == "portable"
    best = available_isas()[0]
    assert NativeOps(1, best).isa == best
    assert best in NativeOps(1, best).fingerprint
    monkeypatch.setenv("PAGETURNER_ISA", "mmx")
    with engine_fault(r"mmx.*portable"):
        NativeOps(1)


def test_without_the_module_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "_native", None)
    ok, why = supported()
    assert not ok
    assert "compiler" in why
    assert native_module.how_to_compile() in why
    with engine_fault("compiler"):
        NativeOps()


@pytest.mark.parametrize(
    ("origin", "end"),
    [
        (
            {"url": "file:///a%20b/checkout", "dir_info": {"editable": True}},
            "--editable '/a b/checkout'",
        ),
        ({"url": "file:///src/checkout", "dir_info": {}}, "--no-deps /src/checkout"),
        ({"url": "file:///tmp/pageturner-0.1.0.tar.gz"}, "--no-deps /tmp/pageturner-0.1.0.tar.gz"),
        (
            {"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "git+https://x/y.git@12ab",
        ),
        ({"url": "file:///tmp/pageturner-0.1.0-py3-none-any.whl"}, "PATH_OF_A_CHECKOUT"),
        (None, "PATH_OF_A_CHECKOUT"),
    ],
)
def test_the_command_installs_again_what_is_installed(
    origin: dict[str, object] | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if name == "direct_url.json" and origin else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    command = native_module.how_to_compile()
    assert command.startswith(f"{sys.executable} -m pip install --force-reinstall --no-deps ")
    assert command.endswith(end)


def test_kernels_of_another_processor_say_how_to_compile_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Module:
        compiled_isas = staticmethod(lambda: ["avx512vnni"])
        available_isas = staticmethod(list)

    monkeypatch.setattr(native_module, "_native", Module)
    ok, why = supported()
    assert not ok
    assert "avx512vnni" in why
    assert native_module.how_to_compile() in why
    Module.available_isas = staticmethod(lambda: ["portable"])
    with engine_fault("PAGETURNER_ISAS=all"):
        native_module.choose_isa("avx2")


def test_without_avx2_it_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "available_isas", lambda: ["portable"])
    monkeypatch.setattr(native_module, "_native", object())
    ok, why = supported()
    assert not ok
    assert "AVX2" in why


@built
def test_unknown_kinds_and_broken_weights_are_refused_by_name(ops: NativeOps) -> None:
    with engine_fault(r"blk\.0.*IQ3_S"):
        ops.pack_weight(Tensor("blk.0", "IQ3_S", (4, 256), np.zeros(4 * 110, np.uint8)))
    with engine_fault(r"short.*bytes"):
        ops.pack_weight(Tensor("short", "Q8_0", (4, 32), np.zeros(4 * 34 - 1, np.uint8)))
    with engine_fault("shape"):
        ops.pack_weight(Tensor("odd", "Q4_1", (4, 33), np.zeros(100, np.uint8)))


@built
def test_vectors_are_plain_fp32(ops: NativeOps) -> None:
    t = vector(33)
    assert np.array_equal(ops.pack_weight(t), t.data.view(np.float32))
    half = Tensor("h", "F16", (4,), np.array([1, 2, 0.5, -3], np.float16).view(np.uint8))
    assert np.array_equal(ops.pack_weight(half), np.array([1, 2, 0.5, -3], np.float32))


@built
def test_kv_that_does_not_fit_is_refused(ops: NativeOps) -> None:
    with engine_fault(code="kv_memory"):
        ops.alloc_kv(KVSpec(30, 2**24, 256, 3, 64, "float16"))
    with engine_fault("int7"):
        ops.alloc_kv(KVSpec(1, 2, 16, 1, 64, "int7"))


@built
def test_indexes_outside_of_the_memory_are_refused(ops: NativeOps) -> None:
    kv = ops.alloc_kv(kv_spec(16, 4, 1, 16, "float16"))
    rows, shape = normal(1, 16), AttentionShape(1, 1, 16, 1.0)
    with pytest.raises(ValueError, match="slots"):
        ops.kv_write(kv, 0, rows, rows, i32([64]))
    with pytest.raises(ValueError, match="layer"):
        ops.kv_write(kv, 1, rows, rows, i32([0]))
    with pytest.raises(ValueError, match="token"):
        ops.embed(ops.pack_weight(weight("F32", 5, 16)), i32([5]))
    with pytest.raises(ValueError, match="block"):
        ops.copy_blocks(kv, [(0, 4)])
    for field, value in (
        ("block_table", [[9]]),
        ("positions", [16]),
        ("context_len", [17]),
        ("slots", [-2]),
    ):
        b = batch([(0, 1)], 16, 2)
        b.block_table = i32([[1]])
        setattr(b, field, i32(value))
        with pytest.raises(ValueError, match=field.split("_")[0]):
            ops.attention(rows, kv, 0, b, shape)


@built
def test_wrong_shapes_are_refused(ops: NativeOps) -> None:
    w = ops.pack_weight(weight("F32", 5, 16))
    with pytest.raises(ValueError, match="shapes"):
        ops.linear(normal(2, 15), w)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(normal(2, 16), w, normal(4))
    with pytest.raises(ValueError, match="one parameter"):
        ops.sample(normal(2, 9), normal(1), i32([0, 0]), normal(2), normal(2), normal(2))


@built
def test_empty_steps_are_fine(ops: NativeOps) -> None:
    assert ops.linear(normal(0, 32), ops.pack_weight(weight("Q4_1", 20, 32))).shape == (0, 20)
    assert ops.norm(normal(0, 8), normal(8), 1e-5).shape == (0, 8)


@built
def test_calls_from_many_threads_are_serialised(ops: NativeOps) -> None:
    packed, x = ops.pack_weight(weight("Q4_1", 300, 96)), normal(40, 96)
    expected, wrong = ops.linear(x, packed), []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(ops.linear(x, packed), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def _in_child(ops: NativeOps, expected: np.ndarray) -> None:
    packed = ops.pack_weight(weight("F32", 64, 32))
    os._exit(0 if np.array_equal(ops.linear(normal(3, 32), packed), expected) else 1)


@built
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_still_computes(ops: NativeOps) -> None:
    expected = ops.linear(normal(3, 32), ops.pack_weight(weight("F32", 64, 32)))
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(ops, expected))
    child.start()
    child.join(20)
    assert child.exitcode == 0


@built
def test_importing_the_backend_is_cheap() -> None:
    code = "import sys, pageturner.kernels.cpu.native; print(' '.join(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "tokenizers", "asyncio", "gguf"} & set(modules.split())


def _wheel(out: Path, **environment: str) -> Path:
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(root),
    ]
    subprocess.run(
        command, check=True, env={**os.environ, **environment}, capture_output=True, timeout=300
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_installing_with_a_broken_compiler_gives_pure_python(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, CXX="/bin/false")
    assert wheel.name.endswith("-none-any.whl")
    assert not [
        name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".cpp"))
    ]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_installing_without_compilers_on_the_path_works(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in filter(None, map(shutil.which, ("cmake", "ninja"))):
        (tools / Path(tool).name).symlink_to(tool)
    wheel = _wheel(tmp_path, PATH=str(tools))
    assert "pageturner/kernels/reference.py" in zipfile.ZipFile(wheel).namelist()
