"""Random weights, batches and layers of odd shapes, for holding one backend against another or itself.

Owns no assertion. A case is a pure function of its arguments, so that two backends can be given the same one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pageturner.formats import ggml
from pageturner.kernels.base import KV, AttentionShape, Batch, KVSpec, Layer, Ops, Rope, Tensor
from pageturner.kernels.cpu.native_module import available_isas

FLOATS = ("F32", "F16", "BF16")  # of any width
KINDS = (*ggml.FLOATS, *ggml.QUANTISED)
# Of each quantised kind: where its fp16 scale lies in a block, where its fp16 minimum, and what one step of
# the integers is worth with a scale of 1.
_SCALES = {
    "Q8_0": (0, None, 64),
    "Q4_0": (0, None, 4),
    "Q4_1": (0, 2, 4),
    "Q5_0": (0, None, 8),
    "Q5_1": (0, 2, 8),
    "Q4_K": (0, 2, 4 * 40),
    "Q5_K": (0, 2, 8 * 40),
    "Q6_K": (208, None, 16 * 60),
    "Q3_K": (108, None, 2 * 16),
    "IQ4_NL": (0, None, 64),
    "IQ4_XS": (0, None, 64 * 16),
    "TQ1_0": (52, None, 1),
    "TQ2_0": (64, None, 1),
}
# Of those with fp32 scales: how many floats a block begins with, and what a step is worth.
_WIDE = {"Q4_W": (2, 4), "Q8_W": (2, 64), "T4_W": (1, 64), "F8_W": (1, 8)}

# Every instruction set of this CPU; in `make test` the best one and AVX2, whose source is its own.
ISAS = [
    pytest.param(isa, marks=[] if i == 0 or isa == "avx2" else [pytest.mark.slow])
    for i, isa in enumerate(available_isas())
]


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Drawing takes most of the time of many tests, so the smaller ones are drawn once and copied."""
    drawn = _drawn if math.prod(shape) <= 1 << 18 else _drawn.__wrapped__
    return drawn(shape, seed).copy()


@lru_cache(maxsize=128)
def _drawn(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape, dtype=np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def fp8(codes: NDArray[np.uint8], scales: NDArray[Any]) -> Tensor:
    """A matrix of e4m3 [rows, columns] with a scale for each row."""
    rows, columns = codes.shape
    blocks = np.empty((rows, columns // 32, 36), np.uint8)
    blocks[..., :4] = scales.astype(np.float32).reshape(-1, 1).view(np.uint8)[:, None]
    blocks[..., 4:] = codes.reshape(rows, -1, 32)
    return Tensor("w", "F8_W", codes.shape, blocks.reshape(-1))


def weight(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix of the kind with values of about 1 / sqrt(columns)."""
    scale = columns**-0.5
    if kind in ("F32", "F16", "BF16"):
        values = normal(rows, columns, seed=seed) * np.float32(scale)
        raw = values.view(np.uint32) >> 16 if kind == "BF16" else values
        raw = np.ascontiguousarray(
            raw, {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[kind]
        )
        return Tensor("w", kind, (rows, columns), raw.reshape(-1).view(np.uint8))
    geometry = ggml.BY_NAME[kind]
    blocks = rows * columns // geometry.values
    data = rng(seed).integers(0, 256, (blocks, geometry.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[:, 0] = 127 + np.floor(np.log2(scale)) - rng(seed).integers(0, 3, blocks)
        return Tensor("w", kind, (rows, columns), data.reshape(-1))
    if kind in _WIDE:
        count, steps = _WIDE[kind]
        floats = (rng(seed + 1).uniform(0.5, 1.5, (blocks, count)) * scale / steps).astype(
            np.float32
        )
        if kind == "T4_W":  # one table for all
            data[:, 4:20] = np.linspace(-127, 120, 16).astype(np.int8).view(np.uint8)
        if kind == "Q4_W":
            floats[:, 1] *= -7.5
        data[:, : 4 * count] = floats.view(np.uint8)
        data[data & 0x7F == 0x7F] ^= (
            kind == "F8_W"
        )  # where it is a NaN (or in a scale, which does not matter)
        return Tensor("w", kind, (rows, columns), data.reshape(-1))
    at, low, steps = _SCALES[kind]
    step = scale / steps
    sizes = rng(seed + 1).uniform(0.5, 1.5, (blocks, 1)) * step
    data[:, at : at + 2] = sizes.astype(np.float16).view(np.uint8)
    if (
        low is not None
    ):  # near the middle of the integers; subtracted, and times 6 bits, in Q4_K and Q5_K
        middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
        lows = rng(seed + 2).uniform(0.8, 1.2, (blocks, 1)) * middle * step
        data[:, low : low + 2] = lows.astype(np.float16).view(np.uint8)
    return Tensor("w", kind, (rows, columns), data.reshape(-1))


def values_of(kind: str) -> int:
    """Columns that a matrix of this kind has at least."""
    return ggml.BY_NAME[kind].values


def vector(n: int, seed: int = 0) -> Tensor:
    values = 1 + 0.1 * normal(n, seed=seed)
    return Tensor("v", "F32", (n,), values.astype(np.float32).view(np.uint8))


def rope_tables(positions: int, half: int, interleaved: bool) -> Rope:
    angle = np.outer(np.arange(positions), 10000.0 ** (-np.arange(half) / half))
    return Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), interleaved)


def batch(runs: list[tuple[int, int]], block_size: int, blocks: int, seed: int = 0) -> Batch:
    """Sequences given as (computed, n): rows at positions computed .. computed+n-1, on shuffled blocks,
    the same for a seed. Tables are one block wider than needed, padded with block 0."""
    order = rng(seed).permutation(np.arange(1, blocks))
    need = [-(-(computed + n) // block_size) for computed, n in runs]
    if sum(need) > len(order):
        raise ValueError("too few blocks for these sequences")
    tables = np.zeros((len(runs), max(need) + 1), np.int32)
    positions, slots, start, used = [], [], [0], 0
    for s, (computed, n) in enumerate(runs):
        tables[s, : need[s]] = order[used : used + need[s]]
        used += need[s]
        at = np.arange(computed, computed + n)
        positions.append(at)
        slots.append(tables[s, at // block_size] * block_size + at % block_size)
        start.append(start[-1] + n)
    contexts = [computed + n for computed, n in runs]
    last = np.array(start[1:]) - 1
    rows = i32(np.concatenate(positions))
    return Batch(
        rows * 0, rows, i32(start), i32(contexts), tables, i32(np.concatenate(slots)), i32(last)
    )


def history(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same sequences, all of their context as rows."""
    return [(0, computed + n) for computed, n in runs]


def fill_kv(ops: Ops, kv: KV, whole: Batch, columns: int, seed: int = 0) -> None:
    """Random K and V for every position of the batch, a function of (sequence, position) alone."""
    k, v = kv_rows(whole, columns, seed)
    ops.kv_write(kv, 0, k, v, whole.slots)


def kv_rows(
    whole: Batch, columns: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    k, v = (
        np.concatenate(
            [
                normal(int(n), columns, seed=seed + 100 * s + part)
                for s, n in enumerate(whole.context_len)
            ]
        )
        for part in (0, 50)
    )
    return k, v


def kv_spec(block_size: int, blocks: int, heads: int, head_dim: int, dtype: str) -> KVSpec:
    return KVSpec(1, blocks, block_size, heads, head_dim, dtype)


def scaled(spec: KVSpec) -> KVSpec:
    """The same of a backend whose fp8 has scales."""
    return replace(spec, scaled=spec.dtype == "fp8_e4m3")


def layer(
    ops: Ops,
    kinds: dict[str, str],
    hidden: int,
    inner: int,
    shape: AttentionShape,
    qwen: bool = False,
) -> Layer:
    """A decoder layer; `kinds` gives the kind of each matrix by its name, "" the one of the others."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    parts: dict[str, Any] = {
        name: ops.pack_weight(weight(kinds.get(name, kinds[""]), *size, seed=7 * i))
        for i, (name, size) in enumerate(sizes.items())
    }
    parts["attn_norm"] = ops.pack_weight(vector(hidden, 1))
    parts["mlp_norm"] = ops.pack_weight(vector(hidden, 2))
    if qwen:
        parts["q_norm"] = ops.pack_weight(vector(shape.head_dim, 3))
        parts["k_norm"] = ops.pack_weight(vector(shape.head_dim, 4))
        for i, (name, n) in enumerate({"q_bias": q, "k_bias": kv, "v_bias": kv}.items()):
            parts[name] = ops.pack_weight(vector(n, 5 + i))
    rope = rope_tables(600, shape.head_dim // 2, interleaved=not qwen)
    made = Layer(shape=shape, rope=rope, eps=1e-5, **parts)
    ops.prepare_layer(made)
    return made


def close(a: np.ndarray, b: np.ndarray, bound: float) -> None:
    """The largest difference is under bound times the root mean square of the reference."""
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max() <= bound * max(
        np.sqrt(np.mean(np.square(b, dtype=np.float64))), 1e-6
    )


def row_of(batch: Batch, row: int) -> Batch:
    """One row of a batch by itself."""
    s = int(np.searchsorted(batch.query_start, row, side="right")) - 1
    position = batch.positions[row : row + 1]
    table, slots = batch.block_table[s : s + 1], batch.slots[:1]
    return Batch(batch.tokens[:1], position, i32([0, 1]), position + 1, table, slots, i32([0]))
