"""The cases of `pageturner bench kernels`: each operator at the shapes and sizes of real models.

Owns what is computed, how many operations and bytes that is, and the random data. Must not know how
it is timed or shown. Data are constant bytes where their values cannot matter to the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pageturner.errors import EngineFault
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.base import (
    F32,
    KV,
    AttentionShape,
    Batch,
    KVSpec,
    Layer,
    Ops,
    Rope,
    Tensor,
    Weight,
)
from pageturner.kernels.choosing import Head

FLOATS = ("F32", "F16", "BF16")
TERMS = {8: 1.0, 12: 1.5, 15: 2.0}  # int8 products of a weight with an activation of so many bits
BLOCK, CONTEXT = 16, 250
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes: width, MLP width, heads, KV heads, head size, vocabulary, layers."""

    name: str
    d: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of the products of a layer, those computed alike together."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.d),
            "k,v": (2 * kv, self.d),
            "o": (self.d, q),
            "gate,up": (2 * self.inner, self.d),
            "down": (self.d, self.inner),
        }

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class CaseSelection:
    """The choice of the cases that are timed."""

    shapes: tuple[ModelShape, ...]
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    kv_kinds: tuple[str, ...]
    sequences: tuple[tuple[int, int, int], ...]  # sequences, context, rows of each


_TABLE = Path(__file__).with_name("kernel_cases.json").read_bytes()
CHOICES = msgspec.json.decode(_TABLE, type=dict[str, CaseSelection])
SHORT = CHOICES["short"]
FULL = CHOICES["full"]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One thing to time. Operations (a multiply or an add) of int8 and of fp32; bytes that must be
    read or written once at least."""

    part: str
    name: str
    kind: str
    rows: int
    integer: float
    floats: float
    nbytes: float
    call: Callable[[], object]


def kernel_cases(ops: Ops, size: CaseSelection, part: str) -> Iterator[KernelCase]:
    """The cases of one part, each made when it is asked for: memory holds one weight at a time."""
    for shape in size.shapes:
        yield from PARTS[part](ops, size, shape)


def weight(ops: Ops, kind: str, n: int, k: int, bits: int = 8) -> Weight:
    """A packed matrix; EngineFault for a kind whose blocks do not fit its rows."""
    block = BY_NAME[kind]
    if k % block.values:
        raise EngineFault(
            "unsupported_weight", f"{kind} needs rows of whole blocks of {block.values}"
        )
    # fp16 scales of about 0.004
    data = np.full(n * k // block.values * block.nbytes, 0x1C, np.uint8)
    return ops.pack_weight(Tensor("w", kind, (n, k), data, bits))


def normal(*shape: int) -> F32:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def gemm(ops: Ops, size: CaseSelection, shape: ModelShape) -> Iterator[KernelCase]:
    """Products with their rounding of activations; "x1.5": activations of 12 bits, which are one
    and a half int8 terms, as `auto` has them; "x2": of 15."""
    for kind in size.kinds:
        for bits in (8, 12, 15) if kind not in FLOATS else (8,):
            for name, (n, k) in {**shape.matrices, "head": (shape.vocab, shape.d)}.items():
                if name not in ("k,v", "head") and bits == 15:
                    continue
                try:
                    w = weight(ops, kind, n, k, bits)
                except EngineFault:
                    continue
                for rows in size.rows:
                    if name != "head" or rows <= 64:
                        yield _product(ops, f"{shape.name} {name} {n}x{k}", kind, w, rows, bits)


def _product(ops: Ops, name: str, kind: str, w: Weight, rows: int, bits: int) -> KernelCase:
    n, k = w.shape
    x, one = normal(rows, k), np.ones(k, np.float32)
    # `logits` keeps its output, which is large
    work = (
        partial(ops.logits, x, Head(one, _EPS, w))
        if " head " in name
        else partial(ops.linear, x, w)
    )
    done = 2.0 * rows * n * k * TERMS[bits]
    integer, floats = (0.0, done) if kind in FLOATS else (done, 0.0)
    nbytes = w.nbytes + 4.0 * rows * (n + k)
    kind += "" if bits == 8 else f" x{TERMS[bits]:g}"
    return KernelCase("gemm", name, kind, rows, integer, floats, nbytes, work)


def decode_batch(sequences: int, context: int, rows: int) -> tuple[Batch, int]:
    """`rows` rows of each sequence, the last of its context, in blocks placed at random; and how
    many."""
    width = -(-context // BLOCK)
    blocks = sequences * width
    table = np.random.default_rng(1).permutation(blocks).reshape(sequences, width).astype(np.int32)
    positions = np.tile(np.arange(context - rows, context), sequences).astype(np.int32)
    at = positions.reshape(sequences, rows)
    slots = np.take_along_axis(table, at // BLOCK, axis=1) * BLOCK + at % BLOCK
    start = np.arange(sequences + 1, dtype=np.int32) * rows
    contexts = np.full(sequences, context, np.int32)
    slots = slots.reshape(-1).astype(np.int32)
    return Batch(positions * 0, positions, start, contexts, table, slots, start[1:] - 1), blocks


def filled(ops: Ops, spec: KVSpec) -> KV:
    """KV storage with values in every slot. EngineFault for a type that the backend has not."""
    kv = ops.alloc_kv(spec)
    every = normal(spec.blocks * BLOCK, spec.kv_heads * spec.head_dim)
    for layer in range(spec.layers):
        ops.kv_write(kv, layer, every, every, np.arange(spec.blocks * BLOCK, dtype=np.int32))
    return kv


def _spec(shape: ModelShape, layers: int, blocks: int, kind: str) -> KVSpec:
    return KVSpec(layers, blocks, BLOCK, shape.kv_heads, shape.head_dim, kind)


def _seen(shape: ModelShape, batch: Batch) -> float:
    """fp32 operations of attention in one layer."""
    return 4.0 * float(np.sum(batch.positions.astype(np.int64) + 1)) * shape.heads * shape.head_dim


def attention(ops: Ops, size: CaseSelection, shape: ModelShape) -> Iterator[KernelCase]:
    for kind in size.kv_kinds:
        for sequences, context, rows in size.sequences:
            batch, blocks = decode_batch(sequences, context, rows)
            spec = _spec(shape, 1, blocks, kind)
            try:
                kv = filled(ops, spec)
            except EngineFault:
                break
            q = normal(sequences * rows, shape.heads * shape.head_dim)
            yield KernelCase(
                "attention",
                f"{shape.name} {sequences} x {context}",
                kind,
                sequences * rows,
                0.0,
                _seen(shape, batch),
                spec.nbytes + 2.0 * q.nbytes,
                partial(ops.attention, q, kv, 0, batch, shape.attention),
            )


def elementwise(ops: Ops, size: CaseSelection, shape: ModelShape) -> Iterator[KernelCase]:
    """Yield the cases of the operations between the matrix products, each called alone; the engine
    runs them inside larger calls."""
    rope, width = _rope(shape), shape.kv_heads * shape.head_dim
    narrow = weight(ops, "Q8_0", 16, shape.d)
    for rows in size.rows:
        batch, blocks = decode_batch(rows, 1, 1)
        x, one = normal(rows, shape.d), np.ones(shape.d, np.float32)
        gate, q, k = (
            normal(rows, shape.inner),
            normal(rows, shape.heads * shape.head_dim),
            normal(rows, width),
        )
        kv = filled(ops, _spec(shape, 1, blocks, "float16"))
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "norm": (2.0 * x.nbytes, partial(ops.norm, x, one, _EPS)),
            "quantise, 16 outputs": (float(x.nbytes), partial(ops.linear, x, narrow)),
            "silu * up": (3.0 * gate.nbytes, partial(ops.act_mul, gate, gate)),
            "rope q": (2.0 * q.nbytes, partial(ops.rope, q, batch.positions, rope, shape.head_dim)),
            "kv write": (3.0 * k.nbytes, partial(ops.kv_write, kv, 0, k, k, batch.slots)),
        }
        for name, (nbytes, call) in calls.items():
            yield KernelCase(
                "elementwise", f"{shape.name} {name}", "float32", rows, 0.0, 0.0, nbytes, call
            )


SAMPLERS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 40": (1.0, 40, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9, min-p 0.05": (0.8, 50, 0.9, 0.05),
}


def sample(ops: Ops, size: CaseSelection, shape: ModelShape) -> Iterator[KernelCase]:
    for rows in (1, 64):
        logits = normal(rows, shape.vocab) * np.float32(3)
        uniform = np.random.default_rng(2).random(rows, np.float32)
        for name, (temperature, k, p, least) in SAMPLERS.items():
            t, top, low = (np.full(rows, v, np.float32) for v in (temperature, p, least))
            call = partial(ops.sample, logits, t, np.full(rows, k, np.int32), top, low, uniform)
            yield KernelCase(
                "sample",
                f"{shape.name} {name}",
                "float32",
                rows,
                0.0,
                0.0,
                float(logits.nbytes),
                call,
            )


def _rope(shape: ModelShape) -> Rope:
    frequencies = 1e4 ** (-np.arange(shape.head_dim // 2) * 2.0 / shape.head_dim)
    angles = np.outer(np.arange(2048), frequencies)
    return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), False)


def layer(ops: Ops, size: CaseSelection, shape: ModelShape) -> Iterator[KernelCase]:
    """All layers of a model in Q4_1 as they are served (activations of 12 bits), and its head in
    Q8_0."""
    layers, head = (
        [_layer(ops, shape) for _ in range(shape.layers)],
        weight(ops, "Q8_0", shape.vocab, shape.d, bits=12),
    )
    weights = [
        w
        for each in layers
        for w in (each.q, each.k, each.v, each.o, each.gate, each.up, each.down)
    ]
    products = sum(2.0 * w.shape[0] * w.shape[1] * TERMS[12] for w in weights)
    nbytes = sum(float(w.nbytes) for w in [*weights, head])
    for sequences, rows in ((1, 1), (8, 1), (32, 1), (64, 1), (1, 512)):
        batch, blocks = decode_batch(sequences, max(rows, CONTEXT), rows)
        spec = _spec(shape, shape.layers, blocks, "float16")
        kv = filled(ops, spec)
        x, last = normal(sequences * rows, shape.d), normal(sequences, shape.d)

        call = partial(_forward, ops, layers, head, x, last, kv, batch)
        integer = products * sequences * rows + 2.0 * sequences * shape.vocab * shape.d * TERMS[12]
        yield KernelCase(
            "layer",
            f"{shape.name} x{shape.layers} and head",
            "Q4_1",
            sequences * rows,
            integer,
            _seen(shape, batch) * shape.layers,
            nbytes + spec.nbytes,
            call,
        )


def _forward(
    ops: Ops, layers: list[Layer], head: Weight, x: F32, last: F32, kv: KV, batch: Batch
) -> None:
    for n, each in enumerate(layers):
        x[:] = 1.0  # what is added again and again would overflow
        ops.mlp_block(ops.attention_block(x, each, kv, n, batch), each)
    ops.logits(last, Head(np.ones(last.shape[1], np.float32), _EPS, head))


def _layer(ops: Ops, shape: ModelShape) -> Layer:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"q": (q, shape.d), "k": (kv, shape.d), "v": (kv, shape.d), "o": (shape.d, q)}
    sizes |= dict.fromkeys(("gate", "up"), (shape.inner, shape.d))
    sizes["down"] = (shape.d, shape.inner)
    parts = {name: weight(ops, "Q4_1", *size, bits=12) for name, size in sizes.items()}
    one = np.ones(shape.d, np.float32)
    made = Layer(
        attn_norm=one, mlp_norm=one, shape=shape.attention, rope=_rope(shape), eps=_EPS, **parts
    )
    ops.prepare_layer(made)
    return made


PARTS: dict[str, Callable[[Ops, CaseSelection, ModelShape], Iterator[KernelCase]]] = {
    "gemm": gemm,
    "attention": attention,
    "elementwise": elementwise,
    "sample": sample,
    "layer": layer,
}
