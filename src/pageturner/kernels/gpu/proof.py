"""Whether a device computes a model as it should: the check behind the first start of each kind of it.

Owns what is compared, on the weights that are loaded: a compiler, a driver or a device that nobody tried can
turn right kernels into wrong ones. Must not know models, files, or where results are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.base import F32, GATED, AttentionShape, Batch, KVSpec, Layer, Stack
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.catalogue import MANY, height_of
from pageturner.kernels.gpu.launches import GpuKV
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.weights import FloatMatrix, Groups, Matrix, Vector, to_bf16
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps

CROWDS = (16, 64, 200, 300)  # rows of products, of all heights but the one of many rows
OUTPUTS = 32  # of each product are compared with numpy
POSITIONS, CHUNK = 600, 80  # of attention: three segments, the last of them not whole; rows of many
TOKENS, OTHERS = 80, (0, 0, 0, 20, 20, 299)  # of whole steps; the last row again among so many sequences
# Of what could add up, sum |x| |w|: sums in fp32 over 16,384 columns are some 1e-5 off
PRODUCT_BOUND = 1e-4
# Of the largest: what attention mixes is rounded to the type of KV
ATTENTION_BOUND = 1e-2
# Of the largest: an exponential of a device is some 1e-6 off
ROW_BOUND = 1e-3
# Of what a layer adds to its rows: what is fused rounds elsewhere
FUSED_BOUND = 2e-2
JOINED = {"qkv": "q, k and v", "gate_up": "gate and up"}
_HOST = ReferenceOps()


def identity(stack: Stack, head: Matrix, spec: KVSpec, length: int) -> str:
    """Of what is checked, as long as this room of ours is as it is: models with the same one use the same
    kernels in the same way."""
    kinds = sorted(map(repr, _kinds(stack)))
    embedded = _form(stack.embed), _form(stack.positions), stack.embed_norm is None, stack.embed_scale == 1
    stored = spec.dtype, spec.block_size, spec.scaled, min(TOKENS, length)
    digest = blake2b(repr((kinds, _form(head), embedded, stored)).encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check(ops: GpuOps, stack: Stack, head: Matrix, spec: KVSpec, length: int = TOKENS) -> None:
    """Products, attention, norms, rotation and activations against numpy; layers as they are computed against
    these; and a row's bits alone and in a crowd, in products, attention and whole steps. EngineFault
    ('gpu_wrong') says what differs. Of layers that are alike one is taken.

    spec    of the KV of the model; how many blocks it has does not matter
    length  tokens that a sequence may have: tables of positions may end there
    """
    length = min(TOKENS, length)
    layers = list(_kinds(stack).values())
    seen = set()
    for name, matrix in [*(part for layer in layers for part in _parts(layer)), ("head", head)]:
        if matrix is not None and _form(matrix) not in seen:
            seen.add(_form(matrix))
            _product(ops, name, matrix)
    for shape in {_bare(layer.shape): layer.shape for layer in layers}.values():
        _attention(ops, shape, spec)
    for layer in layers:
        _rows_alone(ops, layer, length)
    _fused(ops, stack, layers, spec, length)
    _steps(ops, stack, spec, length)


def _wrong(ops: GpuOps, what: str) -> EngineFault:
    where = f"{ops.driver.name} (sm_{ops.driver.architecture})"
    return EngineFault("gpu_wrong", f"{what} on {where}: nothing is served from there; use --device cpu")


def _form(weight: Any) -> object:
    return weight is not None and (weight.form, weight.rows)


def _bare(shape: AttentionShape) -> AttentionShape:
    """Without numbers that kernels only read."""
    return replace(shape, slopes=shape.slopes[:1], sinks=shape.sinks[:1])


def _kinds(stack: Stack) -> dict[object, Layer]:
    """The first of all layers that are computed alike."""
    found: dict[object, Layer] = {}
    for layer in stack.layers:
        there = tuple(
            field.name for field in fields(layer) if getattr(layer, field.name) is not None
        )  # norms, biases
        forms = tuple((name, _form(one)) for name, one in _parts(layer))
        rope, numbers = layer.rope, (layer.act, layer.wide_qk_norm, layer.residual == 1)
        rotated = rope.cos.shape[1], rope.interleaved
        joined = tuple(sorted(layer.native or {}))
        kind = (there, forms, numbers, rotated, joined, _bare(layer.shape), _mixture(layer.experts))
        found.setdefault(kind, layer)
    return found


def _mixture(experts: Experts | None) -> object:
    if experts is None:
        return None
    biases = (
        experts.router_bias is None,
        len(experts.gate_bias),
        len(experts.up_bias),
        len(experts.down_bias),
    )
    how = (experts.top_k, experts.normalise, experts.scoring, experts.scale == 1, experts.weigh_input)
    return len(experts.gate), biases, how


def _parts(layer: Layer) -> list[tuple[str, Matrix | None]]:
    """The matrices that are multiplied with, joined ones and those of an expert too."""
    joined, mixture = layer.native or {}, layer.experts
    parts = [("o", layer.o), ("down", layer.down)]
    parts += [(name, joined[key]) for key, name in JOINED.items() if key in joined]
    if "qkv" not in joined or layer.wide_qk_norm or layer.temper is not None:
        parts += [(name, getattr(layer, name)) for name in "qkv"]
    if "gate_up" not in joined or mixture is not None:
        parts += [("gate", layer.gate), ("up", layer.up)]
    if mixture is not None:
        of_expert = (("gate", mixture.gate[0]), ("up", mixture.up[0]), ("down", mixture.down[0]))
        parts += [("the router", mixture.router), *((f"{name} of an expert", one) for name, one in of_expert)]
    return parts


def crowds(matrix: Matrix) -> list[int]:
    """Numbers of rows so that each height of tiles is used."""
    found = list(CROWDS)
    if isinstance(matrix, FloatMatrix):
        found.append(next(n for n in count(found[-1]) if height_of(n, matrix.rows) == MANY))
    return found


def _product(ops: GpuOps, name: str, matrix: Matrix) -> None:
    random = np.random.default_rng(matrix.rows + matrix.columns)
    x = random.standard_normal((max(CROWDS), matrix.columns), np.float32)
    (alone,) = _multiplied(ops, x[:1], matrix, (0,))
    places = np.linspace(0, matrix.rows - 1, OUTPUTS).astype(np.int32)
    ops.begin()
    values = ops.to_numpy(ops.embed(matrix, places)).astype(np.float64)
    mine = _rounded(x[0], matrix.compute).astype(np.float64)[_order(ops, matrix)]
    bound = PRODUCT_BOUND * (np.abs(values) @ np.abs(mine)).max()
    if np.isfinite(bound) and not (np.abs(alone[places] - values @ mine) <= bound).all():  # NaN is not
        raise _wrong(ops, f"a product with {name} is wrong")
    for rows in crowds(matrix):
        crowd = x[[*(np.arange(rows - 1) % len(x)), 0]]  # first and last
        if not all(_alike(one, alone) for one in _multiplied(ops, crowd, matrix, (0, rows - 1))):
            raise _wrong(ops, f"a product with {name} has other bits among {rows} rows")


def _order(ops: GpuOps, matrix: Matrix) -> Any:
    """Which input each column multiplies."""
    order = np.arange(matrix.columns, dtype=np.int32)
    if isinstance(matrix, Groups) and matrix.order:
        ops.driver.download(order, matrix.order)
    return order


def _attention(ops: GpuOps, shape: AttentionShape, spec: KVSpec) -> None:
    block = spec.block_size
    small = replace(spec, layers=1, blocks=-(-POSITIONS // block))
    kv, theirs = ops.alloc_kv(small), _HOST.alloc_kv(small)
    random = np.random.default_rng(shape.heads)
    slots = np.arange(POSITIONS, dtype=np.int32)
    k, v = random.standard_normal((2, POSITIONS, spec.kv_heads * spec.head_dim), np.float32)
    q = random.standard_normal((CHUNK, shape.heads * shape.head_dim), np.float32)
    q *= np.float32(min(1.0, 1 / (shape.scale * shape.head_dim**0.5)))  # scores as models have them
    try:
        ops.begin()
        ops.kv_write(kv, 0, ops.on_device(k), ops.on_device(v), slots)
        _HOST.kv_write(theirs, 0, k, v, slots)
        expected = _HOST.attention(q, theirs, 0, _rows(block, [(POSITIONS - CHUNK, CHUNK)]), shape)
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


def _rows_alone(ops: GpuOps, layer: Layer, length: int) -> None:
    """What is done to rows beside products and attention."""
    random = np.random.default_rng(length)
    shape, eps, dim, act = layer.shape, layer.eps, layer.shape.head_dim, layer.act
    at = np.array([0, length // 2, length - 1], np.int32)

    def compare(what: str, work: Callable[..., Any], columns: int, *vectors: Vector) -> None:
        x = random.standard_normal((3, columns), np.float32)
        ops.begin()
        found = ops.to_numpy(work(ops, ops.on_device(x), *vectors))
        expected = work(_HOST, x, *(_values(ops, one) for one in vectors))
        bound = ROW_BOUND * np.abs(expected).max()
        if np.isfinite(bound) and not (np.abs(found - expected) <= bound).all():
            raise _wrong(ops, f"{what} is wrong")

    for norm, bias in ((layer.attn_norm, layer.attn_norm_bias), (layer.mlp_norm, layer.mlp_norm_bias)):
        if norm is not None and bias is not None:
            compare("a LayerNorm", lambda on, x, w, b: on.layer_norm(x, w, b, eps), norm.shape[0], norm, bias)
        elif norm is not None:
            compare("an RMSNorm", lambda on, x, w: on.norm(x, w, eps), norm.shape[0], norm)
    if layer.q_norm is not None and not layer.wide_qk_norm:
        heads = shape.heads * dim
        compare("a norm of heads", lambda on, x, w: on.head_norm(x, w, eps, dim), heads, layer.q_norm)
    if layer.rope.cos.shape[1]:
        compare("a rotation", lambda on, x: on.rope(x, at, layer.rope, dim), shape.heads * dim)
    if act in ("silu", GATED):
        name = "act_mul" if act == "silu" else act
        compare("an activation", lambda on, x: getattr(on, name)(x, x), dim)
    else:
        compare("an activation", lambda on, x: on.activate(x, act), dim)


def _values(ops: GpuOps, vector: Vector) -> F32:
    found: F32 = ops.to_numpy(GpuArray(vector.address, (1, vector.shape[0])))[0]
    return found


def _fused(ops: GpuOps, stack: Stack, layers: list[Layer], spec: KVSpec, length: int) -> None:
    """What a layer adds to its rows, as it is computed and by one operation after the other."""
    apart = [replace(layer, native={}) for layer in layers]
    # all of them are kept until the recordings are gone, which know them by where they are
    every = [replace(stack, layers=[one]) for pair in zip(layers, apart, strict=True) for one in pair]
    none = replace(stack, layers=[])
    with _sequence(ops, stack, replace(spec, layers=1), length) as step:
        before = step(none, [(0, length)], True)
        for joined, alone in zip(every[::2], every[1::2], strict=True):
            found, expected = step(joined, [(0, length)], True), step(alone, [(0, length)], True)
            off, added = np.linalg.norm(found - expected), np.linalg.norm(expected - before)
            if np.isfinite(added) and not off <= FUSED_BOUND * added:
                raise _wrong(ops, "a layer is wrong, of which each operation is right,")


def _steps(ops: GpuOps, stack: Stack, spec: KVSpec, length: int) -> None:
    """A sequence at once, its last row again alone, recorded and replayed, and among others."""
    with _sequence(ops, stack, spec, length) as step:
        whole = step(stack, [(0, length)])[-1]
        for others in OTHERS:
            crowd = [(13 * i % length, 1) for i in range(others)]
            if not _alike(step(stack, [*crowd, (length - 1, 1)])[-1], whole):
                raise _wrong(ops, f"a step gives other bits among {others} sequences")


@contextmanager
def _sequence(ops: GpuOps, stack: Stack, spec: KVSpec, length: int) -> Iterator[Callable[..., F32]]:
    """Steps on a KV of one sequence of random tokens: of (tokens computed, rows) of each that reads it, the
    last of which writes it. They give their last rows, or all."""
    kv = ops.alloc_kv(replace(spec, blocks=-(-length // spec.block_size)))
    vocabulary = min(stack.vocabulary or stack.embed.rows, stack.embed.rows)
    tokens = np.random.default_rng(length).integers(0, vocabulary, length).astype(np.int32)

    def step(layers: Stack, runs: list[tuple[int, int]], every: bool = False) -> F32:
        batch = _rows(spec.block_size, runs)
        rows = np.arange(len(batch.positions), dtype=np.int32)
        slots = np.where(rows < len(rows) - runs[-1][1], -1, batch.positions).astype(np.int32)
        wanted = rows if every else batch.logit_rows
        batch = replace(batch, tokens=tokens[batch.positions], slots=slots, logit_rows=wanted)
        return ops.to_numpy(ops.hidden(layers, batch, kv, None))

    try:
        yield step
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


def _multiplied(ops: GpuOps, x: F32, matrix: Matrix, places: tuple[int, ...]) -> list[F32]:
    """Rows of a product at these places. They alone are copied: heads have many outputs."""
    ops.begin()
    out, n = ops.linear(ops.on_device(x), matrix), matrix.rows
    return [ops.to_numpy(GpuArray(out.address + 4 * n * place, (1, n)))[0] for place in places]


def _alike(one: F32, other: F32) -> bool:
    return bool((one.view(np.uint32) == other.view(np.uint32)).all())


def _rounded(x: F32, kind: str) -> F32:
    if kind == "bf16":
        return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float16).astype(np.float32) if kind == "fp16" else x
