"""Weights of floats made into integers at load time: `--quantization int8|int4`.

Owns the choice of scales. Must not know file formats or backends: what comes out are tensors of the
GGUF kinds Q8_0 and Q4_1, with 32 values of a row in a group.

int8  scale = max|x| / 127, q = x / scale: relative error of a matrix (root mean square) about 0.5 %
int4  scale = (max - min) / 15, q = (x - min) / scale: about 8 %. The token embedding and the output
      head, which decide between tokens, take int8 all the same.

Scales and minima are rounded to fp16 first: the integers are the nearest for what is computed with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats.ggml import (
    FLOATS,
    GROUP,
    ROUNDED,
    U8,
    WIDENED,
    dequantise,
    table_of,
    unpack,
)
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.base import F32, Tensor
from pageturner.models.recurrent_weights import EXACT

QUANTIZATIONS = ("none", "int8", "int4")
BYTES_PER_GROUP = {"int8": 34, "int4": 20}

_CHUNK = 1 << 17  # values at once: their fp32 form stays in cache
_PADDING = 16  # groups, so that the values of one do not all fall into one set of the cache


def quantisable(kind: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix of floats in whole groups; others stay as they are."""
    return kind in FLOATS and len(shape) == 2 and shape[1] % GROUP == 0


def quantization_of(field: str, quantization: str) -> str:
    """The quantization of the weight of this name (see models/names.py), where `quantization` is
    asked for."""
    if field in ("router", "positions", *EXACT):
        return "none"
    return "int8" if quantization == "int4" and field in ("embed", "head") else quantization


def not_finite(name: str) -> EngineFault:
    """The fault for a tensor that holds NaN or infinite values."""
    return EngineFault("model_invalid", f"tensor {name!r} holds values that are not finite")


def quantise(tensor: Tensor, quantization: str) -> Tensor:
    """The matrix as Q8_0 ("int8") or Q4_1 ("int4"), or itself where it is not `quantisable`.
    EngineFault('model_invalid') for values that are not finite."""
    if quantization == "none" or not quantisable(tensor.kind, tensor.shape):
        return tensor
    rows, columns = tensor.shape
    groups = columns // GROUP
    raw = tensor.data.reshape(rows, -1)
    out = np.empty((rows, groups, BYTES_PER_GROUP[quantization]), np.uint8)
    write = _int8 if quantization == "int8" else _int4
    step = max(1, _CHUNK // columns)
    threads = len(os.sched_getaffinity(0))

    def convert(first: int) -> bool:
        """Every `threads`-th chunk of rows, from this one on; False where values are not finite."""
        turned = np.empty((GROUP, step * groups + _PADDING), np.float32)
        for start in range(first * step, rows, threads * step):
            part, blocks = (
                raw[start : start + step],
                out[start : start + step].reshape(-1, out.shape[2]),
            )
            values = dequantise(tensor.kind, (len(part), columns), part.reshape(-1))
            x = turned[:, : len(blocks)]
            np.copyto(x, values.reshape(-1, GROUP).T)
            if not write(x, blocks):
                return False
        return True

    with ThreadPoolExecutor(threads) as pool:
        if not all(pool.map(convert, range(threads))):
            raise not_finite(tensor.name)
    kind = "Q8_0" if quantization == "int8" else "Q4_1"
    return Tensor(tensor.name, kind, tensor.shape, out.reshape(-1))


def rounded(tensor: Tensor) -> Tensor:
    """A matrix of a kind that no kernel has (see ROUNDED in formats/ggml.py) as int8 with a scale
    for each 16 values; others as they are. Its error is about 0.2 % (root mean square), where that
    of Q2_K itself is some 20 %."""
    if tensor.kind not in ROUNDED or len(tensor.shape) != 2:
        return tensor

    def write(shape: tuple[int, int], raw: U8, out: U8) -> None:
        values = dequantise(tensor.kind, shape, raw).reshape(len(out), -1, 2, 16)
        scale = np.abs(values).max(axis=-1) / np.float32(127)
        if not np.isfinite(scale).all():
            raise not_finite(tensor.name)
        steps = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        q = np.rint(values * steps[..., None]).astype(np.int8)
        out[..., :8] = scale.view(np.uint8)
        out[..., 8:] = q.reshape(len(out), -1, 32).view(np.uint8)

    return _by_rows(tensor, "Q8_W", write)


def widened(tensor: Tensor) -> Tensor:
    """A matrix of a kind that no kernel has (see WIDENED in formats/ggml.py) as one that holds the
    same values: as one table of up to 16 integers for all of the matrix, or as int8 with a scale for
    each 16 values; others as they are."""
    if tensor.kind not in WIDENED or len(tensor.shape) != 2:
        return tensor
    kind = WIDENED[tensor.kind]
    places = np.zeros(256, np.uint8)
    table = np.zeros(16, np.int8)
    if kind == "T4_W":
        table = table_of(tensor.kind)
        places[table.view(np.uint8)] = np.arange(16)

    def write(shape: tuple[int, int], raw: U8, out: U8) -> None:
        blocks = unpack(tensor.kind, shape, raw)
        q = blocks.q.reshape(*out.shape[:2], GROUP)
        if kind == "Q8_W":
            out[..., :8] = blocks.scale.reshape(len(out), -1, 2).view(np.uint8)
            out[..., 8:] = q.view(np.uint8)
            return
        nibbles = places[q.view(np.uint8)]
        out[..., :4] = blocks.scale[..., None].view(np.uint8)
        out[..., 4:20] = table.view(np.uint8)
        out[..., 20:] = nibbles[..., :16] | nibbles[..., 16:] << np.uint8(4)

    return _by_rows(tensor, kind, write)


def _by_rows(tensor: Tensor, kind: str, write: Callable[[tuple[int, int], U8, U8], None]) -> Tensor:
    """A matrix as blocks of another kind. write: gets the shape of some rows, their bytes, and
    where their blocks go."""
    rows, columns = tensor.shape
    raw = tensor.data.reshape(rows, -1)
    out = np.empty((rows, columns // GROUP, BY_NAME[kind].nbytes), np.uint8)
    step = max(1, 8 * _CHUNK // columns)
    for start in range(0, rows, step):
        part = raw[start : start + step]
        write((len(part), columns), part.reshape(-1), out[start : start + step])
    return Tensor(tensor.name, kind, tensor.shape, out.reshape(-1))


def in_place(tensor: Tensor) -> Tensor:
    """A matrix whose columns lie in another order (Tensor.order) with these where its inputs are:
    int8, since those of a group are no neighbours there."""
    assert tensor.order is not None
    ordered = dequantise(tensor.kind, tensor.shape, tensor.data)
    values = np.empty_like(ordered)
    values[:, tensor.order] = ordered
    return Tensor(tensor.name, "Q8_0", tensor.shape, int8_blocks(values).reshape(-1), tensor.bits)


def int8_blocks(values: F32) -> NDArray[np.uint8]:
    """Values [rows, columns] as Q8_0: [rows, bytes of a row]. EngineFault('model_invalid') if they
    are not finite."""
    out = np.empty((values.size // GROUP, BYTES_PER_GROUP["int8"]), np.uint8)
    if not _int8(np.ascontiguousarray(values.reshape(-1, GROUP).T), out):
        raise EngineFault("model_invalid", "the weights hold values that are not finite")
    return out.reshape(len(values), -1)


# Both work on groups that stand upright, x [32, groups], and use x up: numpy is slow along a short
# last axis.
def _int8(x: F32, out: NDArray[np.uint8]) -> bool:
    """Q8_0 blocks [groups, 34]; False where values are not finite."""
    most = np.maximum(np.abs(x.min(axis=0)), np.abs(x.max(axis=0)))
    if not np.isfinite(most).all():
        return False
    scale = _half(most / np.float32(127))
    x *= _inverse(scale)
    np.clip(np.rint(x, out=x), -127, 127, out=x)
    out[:, :2] = scale[:, None].view(np.uint8)
    np.copyto(out[:, 2:].view(np.int8), x.T, casting="unsafe")
    return True


def _int4(x: F32, out: NDArray[np.uint8]) -> bool:
    """Q4_1 blocks [groups, 20]; False where values are not finite."""
    least, most = x.min(axis=0), x.max(axis=0)
    if not (np.isfinite(least).all() and np.isfinite(most).all()):
        return False
    low, scale = _half(least), _half((most - least) / np.float32(15))
    x -= low.astype(np.float32)
    x *= _inverse(scale)
    np.clip(np.rint(x, out=x), 0, 15, out=x)
    x[16:] *= np.float32(16)  # the high nibbles
    x[:16] += x[16:]
    out[:, :2], out[:, 2:4] = scale[:, None].view(np.uint8), low[:, None].view(np.uint8)
    np.copyto(out[:, 4:], x[:16].T, casting="unsafe")
    return True


def _half(x: F32) -> NDArray[np.float16]:
    limit = np.float32(np.finfo(np.float16).max)
    return np.clip(x, -limit, limit).astype(np.float16)


def _inverse(scale: NDArray[np.float16]) -> F32:
    """1 / scale; 0 for a scale of 0."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
