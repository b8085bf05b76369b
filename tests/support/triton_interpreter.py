"""Kernels in Triton's language executed by its interpreter over plain memory, without torch and a GPU.

Owns how a kernel of the catalogue is run. Sums of matrix products go along K from the first to the last, as
one element of a matrix instruction might, so that no BLAS decides which bits a row gets.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
pytest.importorskip("triton", reason="triton is absent: pip install --group gpu-build")

import triton.language as tl
from triton.runtime import interpreter

from pageturner.kernels.gpu.catalogue import Kernel

_TYPES = {
    "fp64": tl.float64,
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.bfloat16,
    "i8": tl.int8,
    "u8": tl.uint8,
    "i32": tl.int32,
    "i64": tl.int64,
}
_NUMPY = {"fp32": np.float32, "i32": np.int32, "i64": np.int64}
_patched: set[str] = set()  # modules whose functions find the language interpreted


def _wide(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
    """fp32 sums along K, one after the other."""
    left, right, total = _wide(a), _wide(b), d.data.astype(np.float32).copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of one kernel's function by another. The interpreter would patch the language anew each time. Numpy
    sorts: the interpreter's own takes seconds for what a network of comparisons is on a device."""
    if self.fn is tl.sort.fn:
        ordered = np.sort(args[0].handle.data)[:: -1 if kwargs["descending"] else 1]
        return tl.tensor(interpreter.TensorHandle(ordered, args[0].dtype), args[0].type)
    return _ready(self).rewrite()(*args, **kwargs)


def _ready(function: Any) -> Any:
    """A kernel's function in whose module the language is interpreted."""
    if function.fn.__module__ not in _patched:
        interpreter._patch_lang(function.fn)
        # arrays of one element
        tl.core.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
        _patched.add(function.fn.__module__)
    return function


def _cast(self: Any, source: Any, target: Any) -> Any:
    """As devices do it: to bf16 rounded half to even, where the interpreter cuts, and takes an integer for
    the bits."""
    if target.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
        bits = source.data.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(
            16
        )
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)
    if source.dtype.scalar == tl.bfloat16 and target.scalar != tl.bfloat16:
        source = interpreter.TensorHandle(_wide(source), tl.float32)
    return _CAST(self, source, target)


def _asm(
    self: Any,
    text: str,
    constraints: str,
    values: list[Any],
    types: list[Any],
    pure: bool,
    pack: int,
) -> Any:
    """The instructions that kernels have: a copy, and a sum of products where both halves of each word are
    bf16 and nothing is rounded."""
    if text.startswith("mov.b32"):
        return _Values(values)
    assert text.startswith("fma.rn.bf16x2")
    found = []
    for shift in (0, 16):
        a, b, c = (
            (one.data.astype(np.int64) >> shift << 16).astype(np.uint32).view(np.float32)
            for one in values
        )
        exact = a.astype(np.float64) * b + c
        bits = exact.astype(np.float32).view(np.uint32)
        assert (bits.view(np.float32) == exact).all()
        assert (bits & 0xFFFF == 0).all()
        found.append(bits >> 16)
    return _Values([interpreter.TensorHandle((found[0] | found[1] << 16).view(np.int32), tl.int32)])


class _Values(list):  # type: ignore[type-arg]
    def get_result(self, at: int) -> Any:
        return self[at]


def _of_thread(name: str) -> property:
    """Where the program that is interpreted stands, by thread: ranks may be threads of one process."""

    def get(self: Any) -> Any:
        return getattr(_places, name, None)

    def put(self: Any, value: Any) -> None:
        setattr(_places, name, value)

    return property(get, put)


def _masked_load(self: Any, *given: Any) -> Any:
    """A volatile one is of somebody who waits for another thread or process."""
    if given[-1]:
        time.sleep(2e-5)
    return _LOAD(self, *given)


_places = threading.local()
for _name in ("grid_dim", "grid_idx"):
    setattr(interpreter.InterpreterBuilder, _name, _of_thread(_name))
_LOAD = interpreter.InterpreterBuilder.create_masked_load
interpreter.InterpreterBuilder.create_masked_load = _masked_load
_CAST = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_inline_asm = _asm
interpreter.InterpretedFunction.__call__ = _call


def _function(path: str) -> Any:
    module, name = path.split(".")
    return _ready(getattr(importlib.import_module(f"pageturner.kernels.gpu.source.{module}"), name))


def _argument(kind: str, value: float) -> Any:
    if kind.startswith("*"):
        type_ = tl.pointer_type(_TYPES[kind[1:]])
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.uint64), type_), type_)
    type_ = _TYPES[kind]
    return tl.tensor(interpreter.TensorHandle(np.array([value], _NUMPY[kind]), type_), type_)


def in_order(places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The programs of a launch as they run here, one after the other; tests replace it."""
    return places


def check_alignment(kernel: Kernel, values: Sequence[float]) -> None:
    """AssertionError where an argument is no multiple of 16 that a kernel is compiled for as one: on a device
    its loads would be misaligned, or reach into the next row."""
    multiples = kernel.aligned
    for (name, _), value in zip(kernel.arguments, values, strict=True):
        if name in multiples:
            assert int(value) % 16 == 0, (
                f"{kernel.name}: {name} is {value}, which is no multiple of 16"
            )


def run(kernel: Kernel, grid: Sequence[int], values: Sequence[float]) -> None:
    """One launch. values: addresses for pointers."""
    check_alignment(kernel, values)
    function = _function(kernel.function)
    arguments = {
        name: _argument(kind, value)
        for (name, kind), value in zip(kernel.arguments, values, strict=True)
    }
    for name, value in kernel.constants.items():
        named = isinstance(value, str) and value.startswith("dtype:")
        arguments[name] = tl.constexpr(_TYPES[value[6:]] if named else value)
    whole = (*grid, 1, 1)[:3]
    body = function.rewrite()
    interpreter.interpreter_builder.set_grid_dim(*whole)
    with np.errstate(all="ignore"):
        for place in in_order(list(itertools.product(*map(range, whole)))):
            interpreter.interpreter_builder.set_grid_idx(*place)
            body(**arguments)
