"""Kernels that may begin beside the one in front: all of a decode step do, none touches memory too early."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.kernels.gpu.catalogue import kernels_of
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.weights import FloatMatrix
from support.null_gpu import NullDriver

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/pageturner/kernels/gpu/source"
# They are launched when those in front have ended
WAIT_FOR_THE_END: set[str] = set()


def _judge() -> Any:
    spec = importlib.util.spec_from_file_location(
        "compile_judge", ROOT / "bench/gpu/compile_judge.py"
    )
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


JUDGE = _judge()
BEFORE = """
.visible .entry gated(
	.param .u64 .ptr .global .align 1 gated_param_0
)
.reqntid 128
{
	.reg .pred 	%p<3>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [gated_param_0];
	mov.u32 	%r1, %ctaid.x;
	// begin inline asm
	griddepcontrol.launch_dependents; // dummy %r3
	// end inline asm
	st.shared.v2.b32 	[ %r7 + 0 ], {%r6, %r5};
	bar.sync 	0;
	ld.shared.b32 	%r6, [ %r8 + 0 ];
	{ .reg .pred some; setp.gt.s32 some, %r6, 0; @some prefetch.global.L2 [%rd3]; mov.u32 %r5, 0; }
	{ .reg .pred some; setp.gt.s32 some, %r6, 0; @some cp.async.bulk.prefetch.L2.global [%rd3], %r6; }
"""
WAIT = "	// begin inline asm\n	griddepcontrol.wait; // dummy %r4\n	// end inline asm\n"
AFTER = "	@%p1 bra 	$L__BB0_2;\n	ld.global.b32 	%r4, [ %rd1 + 0 ];\n$L__BB0_2:\n	ret;\n}\n"
EARLY = (
    "ld.global.b32 	%r4, [ %rd1 + 0 ];",
    "@%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };",
    "@!%p2 atom.global.gpu.acq_rel.add.u32 %r2, [ %rd1 + 0 ], %r1;",
    "red.global.add.f32 [%rd1], %f1;",
    "cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10, %r3;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r1], [%rd1, {%r2, %r3}], [%r4];",
    "@%p1 bra 	$L__BB0_1;",
    "$L__BB0_1:",
    "@%p1 ret;",
)


def test_a_kernel_that_waits_first_may_begin_early() -> None:
    assert JUDGE.waits(BEFORE + WAIT + AFTER)
    assert not JUDGE.waits(BEFORE + AFTER), (
        "it does not wait, and is launched when the one in front has ended"
    )


@pytest.mark.parametrize("line", EARLY)
def test_nothing_is_read_written_or_passed_by_before(line: str) -> None:
    assert JUDGE.waits(f"{BEFORE}{WAIT}	{line}\n{AFTER}")
    with pytest.raises(ValueError, match="before it waits"):
        JUDGE.waits(f"{BEFORE}	{line}\n{WAIT}{AFTER}")


def test_all_threads_wait() -> None:
    with pytest.raises(ValueError, match="before it waits"):
        JUDGE.waits(BEFORE + WAIT.replace("	grid", "	@%p1 grid") + AFTER)


def _first_call(path: str) -> str:
    """Name of the function that a kernel calls before it does anything."""
    module, name = path.split(".")
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    body = next(
        one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name
    ).body
    first = next(
        one
        for one in body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    )
    called = (
        first.value.func
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call)
        else None
    )
    return called.id if isinstance(called, ast.Name) else ""


def test_every_kernel_begins_early_but_those_that_are_named_here() -> None:
    """One that does not makes all wait for its end, and its successor for it."""
    functions = {kernel.function for kernel in kernels_of(90).values()}
    starts = ("start_dependent", "launch_dependents", "wait")
    assert {one for one in functions if _first_call(one) not in starts} == WAIT_FOR_THE_END


@pytest.mark.parametrize(("side", "early"), [(1024, True), (8192, False)])
def test_kernels_of_large_layers_wait_for_the_end_of_the_one_in_front(
    side: int, early: bool
) -> None:
    ops = GpuOps(NullDriver(), 1 << 20)
    ops.driver.dependent_launch = True
    matrix = FloatMatrix(256, "bf16", side, side)
    layer = SimpleNamespace(**dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), matrix))
    ops.prepare_stack(SimpleNamespace(layers=[layer, layer]))  # type: ignore[arg-type]
    assert ops.driver.dependent_launch is early
