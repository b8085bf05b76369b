"""The GGML block formats taken apart: the values of a tensor in fp32.

Owns the layout of quantised blocks as they lie in files. Must not know where the bytes come from or who
computes with them. Layouts as in `ggml-common.h` of llama.cpp; a block holds 32 values of one row:

    Q8_0   fp16 d, int8 q[32]                    value = d * q
    Q4_0   fp16 d, 16 bytes of nibbles           value = d * (q - 8)
    Q4_1   fp16 d, fp16 m, 16 bytes of nibbles   value = d * q + m

The low nibbles of the 16 bytes are values 0..15 of the block, the high nibbles values 16..31.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.files.kinds import BY_NAME

GROUP = 32  # values in a block of the formats that can be computed with


class Blocks(NamedTuple):
    """A quantised matrix taken apart. value[n, g, i] = scale[n, g] * q[n, g, i] + low[n, g].

    q      int8 [rows, groups, 32]
    scale  fp32 [rows, groups]
    low    fp32 [rows, groups], or None where the format has no minimum
    """

    q: NDArray[np.int8]
    scale: NDArray[np.float32]
    low: NDArray[np.float32] | None


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1).view(np.int8)


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)


def unpack(kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> Blocks:
    """A Q8_0, Q4_0 or Q4_1 matrix taken apart. EngineFault('weight_kind') for any other kind."""
    if kind not in ("Q8_0", "Q4_0", "Q4_1"):
        raise EngineFault("weight_kind", f"weights of kind {kind} are not supported; use F32, Q8_0 or Q4_1")
    rows, columns = shape
    if columns % GROUP:
        raise EngineFault("weight_kind", f"{kind} weights need a multiple of {GROUP} columns, not {columns}")
    raw = data.reshape(rows, columns // GROUP, BY_NAME[kind].nbytes)
    scale = _halves(raw[..., :2])
    if kind == "Q8_0":
        return Blocks(raw[..., 2:].view(np.int8), scale, None)
    if kind == "Q4_0":
        return Blocks(_nibbles(raw[..., 2:]) - np.int8(8), scale, None)
    return Blocks(_nibbles(raw[..., 4:]), scale, _halves(raw[..., 2:4]))


def dequantise(kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of a tensor in fp32, as the `gguf` package has them. EngineFault('weight_kind') else."""
    if kind == "F32":
        return data.view("<f4").reshape(shape).astype(np.float32, copy=False)
    if kind == "F16":
        return data.view("<f2").reshape(shape).astype(np.float32)
    if kind == "BF16":
        return (data.view("<u2").reshape(shape).astype(np.uint32) << 16).view(np.float32)
    columns = shape[-1]
    blocks = unpack(kind, (int(np.prod(shape[:-1])), columns), data)
    out = blocks.scale[..., None] * blocks.q.astype(np.float32)
    if blocks.low is not None:
        out += blocks.low[..., None]
    return out.reshape(shape)
