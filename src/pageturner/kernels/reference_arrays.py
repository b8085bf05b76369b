"""The arrays of the reference backend, and how it rounds: its matrices, its KV, activations as
integers.

Owns these forms and roundings, which are the definition of what every backend's must equal. Must
not know the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageturner.formats import float8, ggml
from pageturner.kernels.adapters import widened
from pageturner.kernels.base import F32, I32


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix [N, K] in fp32."""

    values: F32

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [N, K] in G groups of g = 32 or 16 columns, transposed: value = scale * q + low.

    q      int8 [G, g, N]
    scale  fp32 [G, N]
    low    fp32 [G, N] or None
    bits   see Tensor, and order
    """

    q: NDArray[np.int8]
    scale: F32
    low: F32 | None
    bits: int = 8
    order: NDArray[np.int32] | None = None

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.low is None else self.low.nbytes)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V, each [layers, blocks * block_size, kv_heads, head_dim] in the KV type; a slot is a
    row.

    int8, bfloat16 and fp8_e4m3 are kept as what they stand for, in fp32. Of a latent KV, v is k
    itself.
    """

    k: NDArray[np.floating]
    v: NDArray[np.floating]
    block_size: int
    dtype: str

    @property
    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """k, and v where it has memory of its own."""
        return (self.k,) if self.v is self.k else (self.k, self.v)

    def blocks(self, array: NDArray[np.floating]) -> NDArray[np.floating]:
        """The same memory as [layers, blocks, block_size, kv_heads, head_dim]."""
        layers, _, heads, dim = array.shape
        return array.reshape(layers, -1, self.block_size, heads, dim)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, all layers."""
        return sum(array.nbytes for array in self.arrays) * self.block_size // len(self.k[0])

    def read_blocks(self, blocks: I32) -> NDArray[np.uint8]:
        """See Ops.read_blocks: K of all layers, then V."""
        parts = [self.blocks(array)[:, blocks].swapaxes(0, 1) for array in self.arrays]
        rows = [
            np.ascontiguousarray(part).reshape(len(blocks), -1).view(np.uint8) for part in parts
        ]
        return np.concatenate(rows, axis=1)

    def write_blocks(self, blocks: I32, data: NDArray[np.uint8]) -> None:
        """See Ops.write_blocks."""
        halves = np.split(data, len(self.arrays), axis=1)
        for array, half in zip(self.arrays, halves, strict=True):
            paged = self.blocks(array)
            values = np.ascontiguousarray(half).view(array.dtype)
            paged[:, blocks] = values.reshape(len(blocks), len(paged), *paged.shape[2:]).swapaxes(
                0, 1
            )


def _in_steps(x: F32, most: int = 127) -> tuple[F32, F32]:
    """x in steps of an int8, before rounding, and these steps over its last axis: scale = max|x| /
    most, x * (most / max|x|); zeros have scale 0."""
    peak = np.abs(x).max(axis=-1)
    factor = np.divide(np.float32(most), peak, out=np.zeros_like(peak), where=peak > 0)
    return x * factor[..., None], peak / np.float32(most)


def quantise_rows(x: F32, bits: int) -> tuple[NDArray[np.float64], F32]:
    """Activations [T, K] as integers [T, K/32, 32] (in fp64, rounded half to even) and scales [T,
    K/32].

    15 bits add a second term, what the first one left in 256ths (at most 127): both together as one
    integer. 12 bits round to 16ths of a step, of which there are 119 then. Of 8 elements the first
    four also carry, in 256ths, the lowest four bits (-8 .. 7) of the other four: the products with
    both take one more byte so.
    """
    exact, scale = _in_steps(x.reshape(len(x), -1, ggml.GROUP), 119 if bits == 12 else 127)
    if bits == 12:
        fours = (exact * np.float32(16)).reshape(*exact.shape[:2], 4, 2, 4)
        second = np.rint(fours[..., 1, :])
        low = (second + 8) % 16 - 8
        first = np.rint(fours[..., 0, :] - low * np.float32(0.0625))
        q = np.stack([16 * first + low, 16 * second], axis=-2).reshape(exact.shape)
        return q.astype(np.float64), scale / np.float32(256)
    q = np.rint(exact)
    if bits == 15:
        left = np.rint((exact - q) * np.float32(256))
        q, scale = q * 256 + np.clip(left, -127, 127), scale / np.float32(256)
    return q.astype(np.float64), scale


def _through_int8(heads: F32) -> F32:
    """Return K or V [T, kv_heads, head_dim] through int8, rounded half to even."""
    exact, scale = _in_steps(heads)
    return np.asarray(np.rint(exact) * scale[..., None])


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """The bits of bfloat16, rounded half to even; those of a NaN may be of any number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _through_bfloat16(heads: F32) -> F32:
    """The same as bfloat16."""
    return np.where(np.isnan(heads), heads, widened("BF16", to_bf16(heads)))


def _through_scaled_fp8(heads: F32) -> F32:
    """The same as e4m3 with a scale for each head (KVSpec.scaled)."""
    scale = float8.scale(heads)[..., None]
    return np.asarray(float8.nearest(heads / scale) * scale)


ROUNDINGS: dict[str, Callable[[F32], F32]] = {
    "float32": np.asarray,
    "float16": np.asarray,  # rounded by the array
    "int8": _through_int8,
    "bfloat16": _through_bfloat16,
    "fp8_e4m3": float8.nearest,
    "scaled fp8_e4m3": _through_scaled_fp8,
}
