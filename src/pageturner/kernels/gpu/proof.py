"""Whether a device computes a model as it should: the check behind the first start of each kind of it.

Owns what is compared, on the weights that are loaded: a compiler, a driver or a device that nobody tried can
turn right kernels into wrong ones. Must not know models, files, or where results are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.base import F32, AttentionShape, Batch, KVSpec, Layer, Stack
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.launches import GpuKV
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.weights import Matrix, to_bf16
from pageturner.kernels.reference import ReferenceOps

CROWDS = (16, 64, 200, 300)  # rows of products: at least one for each height of tiles
OUTPUTS = 32  # of each product are compared with numpy
POSITIONS, CHUNK = 600, 80  # of attention: three segments, the last of them not whole; rows of many
TOKENS, OTHERS = 80, (0, 0, 0, 20, 299)  # of whole steps; the last row comes again among so many sequences
# Of what could add up, sum |x| |w|: sums in fp32 over 16,384 columns are some 1e-5 off
PRODUCT_BOUND = 1e-4
# Of the largest: what attention mixes is rounded to the type of KV
ATTENTION_BOUND = 1e-2


def identity(stack: Stack, head: Matrix, spec: KVSpec) -> str:
    """Of what is checked: models with the same one use the same kernels in the same way."""
    products = [(name, one.form, one.rows) for name, one in _matrices(stack, head)]
    told = repr((products, sorted(_shapes(stack), key=repr), spec.dtype, spec.block_size, spec.scaled))
    return blake2b(told.encode(), digest_size=8).hexdigest()


def check(ops: GpuOps, stack: Stack, head: Matrix, spec: KVSpec, length: int = TOKENS) -> None:
    """Products and attention against numpy, and a row's bits alone and in a crowd, in each of them and in
    whole steps. EngineFault('gpu_wrong') says what differs.

    spec    of the KV of the model; how many blocks it has does not matter
    length  tokens that a sequence may have: tables of positions may end there
    """
    for name, matrix in _matrices(stack, head):
        _product(ops, name, matrix)
    for shape in sorted(_shapes(stack), key=repr):
        _attention(ops, shape, spec)
    _steps(ops, stack, spec, min(TOKENS, length))


def _wrong(ops: GpuOps, what: str) -> EngineFault:
    where = f"{ops.driver.name} (sm_{ops.driver.architecture})"
    return EngineFault("gpu_wrong", f"{what} on {where}: nothing is served from there; use --device cpu")


def _shapes(stack: Stack) -> set[AttentionShape]:
    return {layer.shape for layer in stack.layers}


def _matrices(stack: Stack, head: Matrix) -> Iterator[tuple[str, Matrix]]:
    """One of each form and number of rows, by the names of the parts of a layer."""
    seen = set()
    for name, one in [*(part for layer in stack.layers for part in _parts(layer)), ("head", head)]:
        if one is not None and (one.form, one.rows) not in seen:
            seen.add((one.form, one.rows))
            yield name, one


def _parts(layer: Layer) -> list[tuple[str, Matrix | None]]:
    joined = layer.native or {}
    parts = [("q, k and v", joined["qkv"])] if "qkv" in joined else [(f, getattr(layer, f)) for f in "qkv"]
    parts.append(("o", layer.o))
    if "gate_up" in joined:
        return [*parts, ("gate and up", joined["gate_up"]), ("down", layer.down)]
    return [*parts, ("gate", layer.gate), ("up", layer.up), ("down", layer.down)]


def _product(ops: GpuOps, name: str, matrix: Matrix) -> None:
    random = np.random.default_rng(matrix.rows + matrix.columns)
    x = random.standard_normal((max(CROWDS), matrix.columns), np.float32)
    alone = _row(ops, x[:1], 0, matrix)
    places = np.linspace(0, matrix.rows - 1, OUTPUTS).astype(np.int32)
    ops.begin()
    values = ops.to_numpy(ops.embed(matrix, places)).astype(np.float64)
    mine = _rounded(x[0], matrix.compute).astype(np.float64)
    off = np.abs(alone[places] - values @ mine)
    within = off <= PRODUCT_BOUND * (np.abs(values) @ np.abs(mine))  # NaN is not
    if not (values.any() and within.all()):  # who does nothing gives zeros everywhere
        raise _wrong(ops, f"a product with {name} is wrong")
    for rows in CROWDS:
        crowd = np.concatenate([x[: rows - 1], x[:1]])  # first and last
        for place in (0, rows - 1):
            if not _alike(_row(ops, crowd, place, matrix), alone):
                raise _wrong(ops, f"a product with {name} has other bits among {rows} rows")


def _attention(ops: GpuOps, shape: AttentionShape, spec: KVSpec) -> None:
    block = spec.block_size
    small = replace(spec, layers=1, blocks=-(-POSITIONS // block))
    reference = ReferenceOps()
    kv, theirs = ops.alloc_kv(small), reference.alloc_kv(small)
    random = np.random.default_rng(shape.heads)
    slots = np.arange(POSITIONS, dtype=np.int32)
    k, v = random.standard_normal((2, POSITIONS, spec.kv_heads * spec.head_dim), np.float32)
    q = random.standard_normal((CHUNK, shape.heads * shape.head_dim), np.float32)
    try:
        ops.begin()
        ops.kv_write(kv, 0, ops.on_device(k), ops.on_device(v), slots)
        reference.kv_write(theirs, 0, k, v, slots)
        expected = reference.attention(q, theirs, 0, _rows(block, [(POSITIONS - CHUNK, CHUNK)]), shape)
        chunk = _mixed(ops, kv, q, _rows(block, [(POSITIONS - CHUNK, CHUNK)]), shape)
        off = np.abs(chunk - expected)
        if not (off <= ATTENTION_BOUND * np.abs(expected).max()).all():
            raise _wrong(ops, f"attention in {spec.dtype} is wrong")
        for others in (0, 1, CHUNK):
            runs = [*((POSITIONS - 1 - at, 1) for at in range(others)), (POSITIONS - 1, 1)]
            crowd = np.concatenate([q[:others], q[-1:]])
            if not _alike(_mixed(ops, kv, crowd, _rows(block, runs), shape)[-1], chunk[-1]):
                raise _wrong(ops, f"attention in {spec.dtype} has other bits among {others} sequences")
    finally:
        ops.free_kv(kv)
        ops.begin()


def _steps(ops: GpuOps, stack: Stack, spec: KVSpec, length: int) -> None:
    """A sequence at once, its last row again alone, recorded and replayed, and among others."""
    kv = ops.alloc_kv(replace(spec, blocks=-(-length // spec.block_size)))
    vocabulary = stack.vocabulary or stack.embed.rows
    tokens = np.random.default_rng(length).integers(0, vocabulary, length).astype(np.int32)

    def last(runs: list[tuple[int, int]]) -> F32:
        batch = _rows(spec.block_size, runs)
        written = np.where(
            np.arange(len(batch.positions)) < len(batch.positions) - runs[-1][1], -1, batch.positions
        )
        batch = replace(batch, tokens=tokens[batch.positions], slots=written.astype(np.int32))
        found: F32 = ops.to_numpy(ops.hidden(stack, batch, kv, None))[-1]
        return found

    try:
        whole = last([(0, length)])
        if not np.isfinite(whole).all():
            raise _wrong(ops, "a step gives what is no number")
        for others in OTHERS:
            crowd = [(13 * i % length, 1) for i in range(others)]
            if not _alike(last([*crowd, (length - 1, 1)]), whole):
                raise _wrong(ops, f"a step gives other bits among {others} sequences")
    finally:
        if ops.graphs is not None:
            ops.graphs.release()  # they are of this KV
        ops.free_kv(kv)
        ops.begin()


def _rows(block: int, runs: list[tuple[int, int]]) -> Batch:
    """A step of sequences that all lie in the same blocks: (tokens computed, rows) of each. Wanted are their
    last rows."""
    counts = [n for _, n in runs]
    positions = np.concatenate([np.arange(done, done + n, dtype=np.int32) for done, n in runs])
    contexts = np.array([done + n for done, n in runs], np.int32)
    blocks = np.arange(-(-int(contexts.max()) // block), dtype=np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return Batch(
        np.zeros(len(positions), np.int32), positions, starts, contexts, np.tile(blocks, (len(runs), 1)),
        np.full(len(positions), -1, np.int32), starts[1:] - 1,
    )  # fmt: skip


def _mixed(ops: GpuOps, kv: GpuKV, q: F32, batch: Batch, shape: AttentionShape) -> F32:
    ops.begin()
    return ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, batch, shape))


def _row(ops: GpuOps, x: F32, row: int, matrix: Matrix) -> F32:
    """Of a product. It alone is copied: heads have many outputs."""
    ops.begin()
    out = ops.linear(ops.on_device(x), matrix)
    found: F32 = ops.to_numpy(GpuArray(out.address + 4 * matrix.rows * row, (1, matrix.rows)))[0]
    return found


def _alike(one: F32, other: F32) -> bool:
    return bool((one.view(np.uint32) == other.view(np.uint32)).all())


def _rounded(x: F32, kind: str) -> F32:
    if kind == "bf16":
        return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float16).astype(np.float32) if kind == "fp16" else x
