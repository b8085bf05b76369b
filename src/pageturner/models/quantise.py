"""Weights of floats made into integers at load time: `--quantization int8|int4`.

Owns the choice of scales. Must not know file formats or backends: what comes out are tensors of the GGUF
kinds Q8_0 and Q4_1, with 32 values of a row in a group.

int8  scale = max|x| / 127, q = x / scale: relative error of a matrix (root mean square) about 0.5 %
int4  scale = (max - min) / 15, q = (x - min) / scale: about 8 %. The token embedding and the output head,
      which decide between tokens, take int8 all the same.

Scales and minima are rounded to fp16 first: the integers are the nearest for what is computed with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.files.ggml import GROUP, dequantise
from pageturner.kernels.base import F32, Tensor

QUANTIZATIONS = ("none", "int8", "int4")
BYTES_PER_GROUP = {"int8": 34, "int4": 20}

_CHUNK = 1 << 20  # values in fp32 at once
_FLOATS = ("F32", "F16", "BF16")


def quantisable(kind: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of floats in whole groups; others stay as they are."""
    return kind in _FLOATS and len(shape) == 2 and shape[1] % GROUP == 0


def quantization_of(field: str, quantization: str) -> str:
    """What `quantization` means for the weight of this name (see models/names.py)."""
    if field in ("router", "positions"):
        return "none"
    return "int8" if quantization == "int4" and field in ("embed", "head") else quantization


def quantise(tensor: Tensor, quantization: str) -> Tensor:
    """The matrix as Q8_0 ("int8") or Q4_1 ("int4"), or itself where it is not `quantisable`.
    EngineFault('model_invalid') for values that are not finite."""
    if quantization == "none" or not quantisable(tensor.kind, tensor.shape):
        return tensor
    rows, columns = tensor.shape
    raw = tensor.data.reshape(rows, -1)
    out = np.empty((rows, columns // GROUP, BYTES_PER_GROUP[quantization]), np.uint8)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = raw[start : start + step]
        values = dequantise(tensor.kind, (len(part), columns), part.reshape(-1))
        if not np.isfinite(values).all():
            raise EngineFault("model_invalid", f"tensor {tensor.name!r} holds values that are not finite")
        groups = values.reshape(len(part), -1, GROUP)
        out[start : start + step] = _int8(groups) if quantization == "int8" else _int4(groups)
    kind = "Q8_0" if quantization == "int8" else "Q4_1"
    return Tensor(tensor.name, kind, tensor.shape, out.reshape(-1))


def _int8(x: F32) -> NDArray[np.uint8]:
    """Groups [rows, groups, 32] as Q8_0 blocks."""
    scale = _half(np.abs(x).max(axis=2, keepdims=True) / np.float32(127))
    q = np.clip(np.rint(x * _inverse(scale)), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), q.view(np.uint8)], axis=2)


def _int4(x: F32) -> NDArray[np.uint8]:
    """Groups [rows, groups, 32] as Q4_1 blocks."""
    least = x.min(axis=2, keepdims=True)
    low = _half(least)
    scale = _half((x.max(axis=2, keepdims=True) - least) / np.float32(15))
    q = np.clip(np.rint((x - low.astype(np.float32)) * _inverse(scale)), 0, 15).astype(np.uint8)
    nibbles = q[..., :16] | q[..., 16:] << np.uint8(4)
    return np.concatenate([scale.view(np.uint8), low.view(np.uint8), nibbles], axis=2)


def _half(x: F32) -> NDArray[np.float16]:
    limit = np.float32(np.finfo(np.float16).max)
    return np.clip(x, -limit, limit).astype(np.float16)


def _inverse(scale: NDArray[np.float16]) -> F32:
    """1 / scale; 0 for a scale of 0."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
