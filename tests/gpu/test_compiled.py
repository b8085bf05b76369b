"""What compiled kernels take, beside what is recorded; and what `compile_kernels.py` lets be recorded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageturner.kernels.gpu.catalogue import ARCHITECTURES, kernels_of

GPU = Path(__file__).parents[2] / "bench" / "gpu"


def _judge() -> Any:
    spec = importlib.util.spec_from_file_location("compile_judge", GPU / "compile_judge.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


JUDGE = _judge()


def checked(*options: str) -> None:
    """In a process of its own: tests of kernels interpret the language in this one."""
    pytest.importorskip("triton", reason="triton is absent: pip install --group gpu-build")
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, GPU / "compile_kernels.py", "--check", "--processes", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_take_what_is_recorded_on_every_architecture() -> None:
    checked("--sample")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_kernel_takes_what_is_recorded() -> None:
    checked()


def test_the_sample_is_of_the_catalogue_and_has_a_product_and_attention() -> None:
    for architecture in ARCHITECTURES:
        assert set(JUDGE.SAMPLE) <= set(kernels_of(architecture))


BEFORE = {"a": [100, 8, 4096]}


@pytest.mark.parametrize(
    ("now", "record", "accepted", "wrong", "told"),
    [
        ([100, 8, 4096], False, "", 0, 0),
        ([116, 0, 5120], False, "", 0, 1),  # less spilled, the others within the tolerance
        ([117, 8, 4096], False, "", 1, 0),
        ([100, 8, 5121], False, "", 1, 0),
        ([117, 8, 9000], True, "", 0, 1),
        ([100, 16, 4096], False, "", 1, 0),
        ([100, 16, 4096], False, "a", 1, 0),
        ([100, 16, 4096], True, "", 1, 0),
        ([100, 16, 4096], True, "a", 0, 1),
    ],
)
def test_what_grows_fails_until_it_is_recorded(
    now: list[int], record: bool, accepted: str, wrong: int, told: int
) -> None:
    found = JUDGE.compare(80, {"a": now}, BEFORE, record, {accepted})
    assert tuple(map(len, found)) == (wrong, told)


def test_a_new_kernel_that_spills_is_recorded_only_by_name() -> None:
    new = {"b": [100, 8, 0], "c": [100, 0, 0]}
    assert len(JUDGE.compare(80, new, BEFORE, False, set())[0]) == 2
    wrong, told = JUDGE.compare(80, new, BEFORE, True, set())
    assert (len(wrong), "b: 8 bytes spilled" in wrong[0], len(told)) == (1, True, 1)
    assert JUDGE.compare(80, new, BEFORE, True, {"b"})[0] == []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    recorded = JUDGE.read()
    JUDGE.write(recorded, tmp_path / "resources.json")
    assert (tmp_path / "resources.json").read_text() == JUDGE.RESOURCES.read_text()


@pytest.mark.parametrize(
    ("product", "element", "width", "wrong"),
    [
        ("tt.dot", "f16", 2, 0),
        ("tt.dot", "bf16", 4, 1),
        ("tt.dot", "f32", 1, 0),
        ("tt.dot", "f8E4M3FN", 4, 0),
        ("ttng.warp_group_dot", "f16", 4, 1),
        ("arith.addf", "f16", 4, 0),  # on the way to an operand
    ],
)
def test_an_operand_whose_registers_hold_other_columns_is_refused(
    product: str, element: str, width: int, wrong: int
) -> None:
    lies = f"tensor<16x64x{element}, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    told = JUDGE.split_words(
        f"  %1 = {product} %a, %b, %c : {lies} * {lies} -> tensor<16x64xf32, #mma>\n"
    )
    assert len(told) == wrong
