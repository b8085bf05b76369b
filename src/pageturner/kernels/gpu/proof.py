"""The self-test of a device: the check behind its first start that it computes a model as it
should.

Owns what is compared, on the weights that are loaded: a compiler, a driver or a device that nobody
tried can turn right kernels into wrong ones. Must not know models, files, or where results are
kept.

For Llama-3.1-8B in bf16 that is 153 launches (13 for each of five forms of products, 30 for
adapters, 33 for layers) and 16 steps of the whole model, of which 11 are replayed; numpy takes most
of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import AdapterWeights, LowRank, widened
from pageturner.kernels.base import (
    F32,
    GATED,
    I32,
    AttentionShape,
    Batch,
    KVSpec,
    Layer,
    Stack,
)
from pageturner.kernels.choosing import Draw, Head
from pageturner.kernels.edits import Edit, Operation, apply_edits
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.catalogue import MANY, height_of
from pageturner.kernels.gpu.launches import GpuKV
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.sampling import edit_on_device
from pageturner.kernels.gpu.weights import FloatMatrix, Groups, Matrix, Vector
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.reference_arrays import PagedKV, to_bf16

CROWDS = (16, 64, 200, 300)  # rows of products, of all heights but the one of many rows
OUTPUTS = 32  # of each product are compared with numpy
POSITIONS, CHUNK = 600, 80  # of attention: three segments, the last of them not whole; rows of many
# Of whole steps: two segments, the last of them not whole; the last row again among so many
# sequences
TOKENS, OTHERS = 300, (0, 0, 0, 20, 20, 299)
LAYER = 1  # of a KV, behind one in which nothing is written
EXTRA = 3  # blocks of a KV beside those of two sequences
DRAWS, MARGIN = 9, 1e-4  # rows that are drawn from; how near to a bound of theirs they may not be
RANKS = (5, 17)  # of an adapter: a part of a block of ranks, and two of them
ADAPTER_KINDS = ("F32", "F16", "BF16")
# Of what could add up, sum |x| |w|: sums in fp32 over 16,384 columns are some 1e-5 off
PRODUCT_BOUND = 1e-4
# Of the largest: what attention mixes is rounded to the type of KV
ATTENTION_BOUND = 1e-2
# Of the largest: an exponential of a device is some 1e-6 off
ROW_BOUND = 1e-3
# Of the largest: sums of adapters of 16 bits are rounded between the two products
ADAPTER_BOUND = 1e-2
# Of what a layer adds to its rows: what is fused rounds elsewhere
FUSED_BOUND = 2e-2
JOINED = {"qkv": "q, k and v", "gate_up": "gate and up"}
_HOST = ReferenceOps()


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is tested. spec: of the KV of the model, whose number of blocks does not
    matter; length: tokens that a sequence may have, because tables of positions may end there."""

    ops: GpuOps
    stack: Stack
    head: Head
    spec: KVSpec
    length: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """form: what is compared, by which its result is kept. run: EngineFault('gpu_wrong') says what
    is wrong."""

    form: str
    run: Callable[[], None]


def code_digest() -> str:
    """A digest of this room of ours: what was compared by other code says nothing."""
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def attention_form(dtype: str, block_size: int, shape: AttentionShape) -> str:
    """The form of attention over KV of this type."""
    group = shape.heads // shape.kv_heads
    heads = f"heads of {shape.head_dim}, {group} to a KV head"
    return f"attention over {dtype} KV, {heads}, blocks of {block_size}"


def check(subject: Subject) -> None:
    """All comparisons, one after the other; EngineFault('gpu_wrong') by the first that differs."""
    for one in comparisons(subject):
        one.run()


def comparisons(subject: Subject) -> list[Comparison]:
    """Products, attention, norms, rotation, activations, adapters, edits and draws against numpy;
    layers as they are computed against these; copies of blocks; and a row's bits alone and in a
    crowd, in products, attention and whole steps, recorded, and with tokens that stay on the
    device. Of layers that are alike one is taken; two comparisons of one form are one."""
    ops, stack, head, spec = subject.ops, subject.stack, subject.head, subject.spec
    subject = replace(subject, length=min(TOKENS, subject.length))
    layers = list(_kinds(stack).values())
    found: dict[str, list[Callable[[], None]]] = {}

    def add(form: str, work: Callable[..., None], *arguments: Any) -> None:
        found.setdefault(form, []).append(partial(work, *arguments))

    products = [*(part for layer in layers for part in _parts(layer)), ("head", head.weight)]
    for matrix, name in {
        _form(one): (one, name) for name, one in reversed(products) if one
    }.values():
        add(f"product with weights of {_words(matrix)}", _product, ops, name, matrix)
    for shape in {_bare(layer.shape): layer.shape for layer in layers}.values():
        add(attention_form(spec.dtype, spec.block_size, shape), _attention, ops, shape, spec)
    add(
        f"blocks of {spec.dtype} KV, {spec.block_size} tokens",
        _block_copies,
        ops,
        layers[0].shape,
        spec,
    )
    for layer in layers:
        form = f"rows with {layer.act}, heads of {layer.shape.head_dim}"
        add(form, _rows_alone, ops, layer, subject.length)
    vocabulary = head.weight.rows
    add(f"edits of {vocabulary} logits", _edits, ops, vocabulary)
    add(f"draws from {vocabulary} tokens", _draws, ops, vocabulary)
    for kind in ADAPTER_KINDS:
        add(f"adapters in {kind} on rows in {layers[0].o.compute}", _adapter, ops, stack, kind)
    named = repr((_identity(stack, head.weight, spec), subject.length)).encode()
    mark = blake2b(named, digest_size=4).hexdigest()
    add(f"layers of kind {mark}", _fused, subject, layers)
    add(f"steps of kind {mark}", _steps, subject)
    return [Comparison(form, partial(_one_by_one, works)) for form, works in found.items()]


def _one_by_one(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()


def _identity(stack: Stack, head: Matrix, spec: KVSpec) -> object:
    """Return the shape of layers and steps of a model: those of models with the same one use the
    same kernels in the same way."""
    embedded = (
        _form(stack.embed),
        _form(stack.positions),
        stack.embed_norm is None,
        stack.embed_scale == 1,
    )
    return (
        sorted(map(repr, _kinds(stack))),
        _form(head),
        embedded,
        spec.dtype,
        spec.block_size,
        spec.scaled,
    )


def _wrong(ops: GpuOps, what: str) -> EngineFault:
    where = f"{ops.driver.name} (sm_{ops.driver.architecture})"
    return EngineFault("gpu_wrong", f"{what} on {where}")


def _words(matrix: Matrix) -> str:
    """The form of a matrix, to be read."""
    beside = "".join(f" {name}" for name, _ in matrix.parts() if name in ("scale", "low"))
    return f"{matrix.sort}{beside} [{matrix.rows}, {matrix.columns}]"


def _form(weight: Any) -> object:
    return weight is not None and (weight.form, weight.rows)


def _bare(shape: AttentionShape) -> AttentionShape:
    """Leave out numbers that kernels only read."""
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
    how = (
        experts.top_k,
        experts.normalise,
        experts.scoring,
        experts.scale == 1,
        experts.weigh_input,
    )
    return len(experts.gate), biases, how


def _parts(layer: Layer) -> list[tuple[str, Matrix | None]]:
    """The matrices that are multiplied with, joined ones and those of an expert too."""
    joined, mixture = layer.native or {}, layer.experts
    parts = [("o", layer.o), ("down", layer.down)]
    parts += [(name, joined[key]) for key, name in JOINED.items() if key in joined]
    if "qkv" not in joined or layer.wide_qk_norm or layer.attn_temperature is not None:
        parts += [(name, getattr(layer, name)) for name in "qkv"]
    if "gate_up" not in joined or mixture is not None:
        parts += [("gate", layer.gate), ("up", layer.up)]
    if mixture is not None:
        of_expert = (("gate", mixture.gate[0]), ("up", mixture.up[0]), ("down", mixture.down[0]))
        parts += [
            ("the router", mixture.router),
            *((f"{name} of an expert", one) for name, one in of_expert),
        ]
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
    if (
        np.isfinite(bound) and not (np.abs(alone[places] - values @ mine) <= bound).all()
    ):  # NaN is not
        raise _wrong(ops, f"a product with {name} is wrong")
    for rows in crowds(matrix):
        crowd = x[[*(np.arange(rows - 1) % len(x)), 0]]  # first and last
        try:
            among = _multiplied(ops, crowd, matrix, (0, rows - 1))
        except EngineFault as fault:
            if fault.code != "gpu_memory":
                raise
            continue  # no step of so many rows fits there
        if not all(_alike(one, alone) for one in among):
            raise _wrong(ops, f"a product with {name} has other bits among {rows} rows")


def _order(ops: GpuOps, matrix: Matrix) -> Any:
    """Return the input that each column multiplies."""
    order = np.arange(matrix.columns, dtype=np.int32)
    if isinstance(matrix, Groups) and matrix.order:
        ops.driver.download(order, matrix.order)
    return order


def _attention(ops: GpuOps, shape: AttentionShape, spec: KVSpec) -> None:
    with _filled(ops, shape, spec) as (kv, theirs, tables):
        random = np.random.default_rng(shape.heads)
        q = random.standard_normal((CHUNK, shape.heads * shape.head_dim), np.float32)
        # scores as models have them
        q *= np.float32(min(1.0, 1 / (shape.scale * shape.head_dim**0.5)))
        whole = _batch(tables[:1], [(0, POSITIONS - CHUNK, CHUNK)])
        expected = _HOST.attention(q, theirs, LAYER, whole, shape)
        chunk = _mixed(ops, kv, q, whole, shape)
        off = np.abs(chunk - expected)
        if not (off <= ATTENTION_BOUND * np.abs(expected).max()).all():
            raise _wrong(ops, f"attention in {spec.dtype} is wrong")
        for others in (0, 1, CHUNK):
            runs = [*((1, POSITIONS - 1 - at, 1) for at in range(others)), (0, POSITIONS - 1, 1)]
            crowd = np.concatenate([q[:others], q[-1:]])
            if not _alike(_mixed(ops, kv, crowd, _batch(tables, runs), shape)[-1], chunk[-1]):
                raise _wrong(
                    ops, f"attention in {spec.dtype} has other bits among {others} sequences"
                )


def _block_copies(ops: GpuOps, shape: AttentionShape, spec: KVSpec) -> None:
    """A block of each layer that is copied, and read in place of the first one."""
    with _filled(ops, shape, spec) as (kv, _, tables):
        q = np.random.default_rng(5).standard_normal((1, shape.heads * shape.head_dim), np.float32)
        copied = tables[:1].copy()
        copied[0, [0, -1]] = copied[0, [-1, 0]]  # columns behind the last one are blocks of nobody
        last = [(0, min(POSITIONS, spec.block_size) - 1, 1)]
        before = _mixed(ops, kv, q, _batch(tables[:1], last), shape)
        ops.copy_blocks(kv, [(int(tables[0, 0]), int(copied[0, 0]))])
        if not _alike(_mixed(ops, kv, q, _batch(copied, last), shape), before):
            raise _wrong(ops, f"a copy of a block of {spec.dtype} KV differs")


@contextmanager
def _filled(
    ops: GpuOps, shape: AttentionShape, spec: KVSpec
) -> Iterator[tuple[GpuKV, PagedKV, I32]]:
    """A KV of two layers, of which the second has two sequences of random rows; the same on the
    host; and their block tables."""
    tables = _tables(POSITIONS, spec.block_size)
    small = replace(spec, layers=LAYER + 1, blocks=int(tables.max()) + 1)
    kv, theirs = ops.alloc_kv(small), _HOST.alloc_kv(small)
    random = np.random.default_rng(shape.kv_heads)
    try:
        for sequence in (0, 1):
            k, v = random.standard_normal((2, POSITIONS, spec.kv_heads * spec.head_dim), np.float32)
            slots = _slots(tables[sequence], np.arange(POSITIONS), spec.block_size)
            ops.begin()
            ops.kv_write(
                kv, LAYER, ops.on_device(k), None if spec.latent else ops.on_device(v), slots
            )
            _HOST.kv_write(theirs, LAYER, k, None if spec.latent else v, slots)
        yield kv, theirs, tables
    finally:
        ops.free_kv(kv)
        ops.begin()


def _tables(positions: int, block: int) -> I32:
    """Block tables of two sequences of so many positions, in no order, and behind them a block of
    nobody."""
    count = -(-positions // block)
    order = np.random.default_rng(count).permutation(2 * count + EXTRA).astype(np.int32)
    mine = order[: 2 * count].reshape(2, count)
    return np.concatenate([mine, order[2 * count : 2 * count + 2, None]], axis=1)


def _slots(table: I32, positions: NDArray[np.integer[Any]], block: int) -> I32:
    found: I32 = (table[positions // block] * block + positions % block).astype(np.int32)
    return found


def _rows_alone(ops: GpuOps, layer: Layer, length: int) -> None:
    """Test operations on rows beside products and attention."""
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

    for norm, bias in (
        (layer.attn_norm, layer.attn_norm_bias),
        (layer.mlp_norm, layer.mlp_norm_bias),
    ):
        if norm is not None and bias is not None:
            compare(
                "a LayerNorm",
                lambda on, x, w, b: on.layer_norm(x, w, b, eps),
                norm.shape[0],
                norm,
                bias,
            )
        elif norm is not None:
            compare("an RMSNorm", lambda on, x, w: on.norm(x, w, eps), norm.shape[0], norm)
    if layer.q_norm is not None and not layer.wide_qk_norm:
        heads = shape.heads * dim
        compare(
            "a norm of heads", lambda on, x, w: on.head_norm(x, w, eps, dim), heads, layer.q_norm
        )
    if layer.rope.cos.shape[1]:
        turned = dim if layer.latent is None else 2 * layer.rope.cos.shape[1]
        compare(
            "a rotation", lambda on, x: on.rope(x, at, layer.rope, turned), shape.heads * turned
        )
    if act in ("silu", GATED):
        name = "act_mul" if act == "silu" else act
        compare("an activation", lambda on, x: getattr(on, name)(x, x), dim)
    else:
        compare("an activation", lambda on, x: on.activate(x, act), dim)


def _values(ops: GpuOps, vector: Vector) -> F32:
    found: F32 = ops.to_numpy(GpuArray(vector.address, (1, vector.shape[0])))[0]
    return found


def _fused(subject: Subject, layers: list[Layer]) -> None:
    """Compare a layer's addition to its rows with that of one operation after the other."""
    ops, stack, length = subject.ops, subject.stack, subject.length
    apart = [replace(layer, native={}) for layer in layers]
    # all of them are kept until the recordings are gone, which know them by where they are
    every = [
        replace(stack, layers=[one]) for pair in zip(layers, apart, strict=True) for one in pair
    ]
    none = replace(stack, layers=[])
    with _sequence(replace(subject, spec=replace(subject.spec, layers=1))) as step:
        before = step(none, [(0, 0, length)], True)
        for joined, alone in zip(every[::2], every[1::2], strict=True):
            found, expected = (
                step(joined, [(0, 0, length)], True),
                step(alone, [(0, 0, length)], True),
            )
            off, added = np.linalg.norm(found - expected), np.linalg.norm(expected - before)
            if np.isfinite(added) and not off <= FUSED_BOUND * added:
                raise _wrong(ops, "a layer is wrong, of which each operation is right,")


def _steps(subject: Subject) -> None:
    """A sequence at once, its last row again alone, recorded and replayed, and among others; and
    with a token that stays on the device."""
    ops, stack, length = subject.ops, subject.stack, subject.length
    with _sequence(subject) as step:
        whole = step(stack, [(0, 0, length)])[-1]
        for others in OTHERS:
            crowd = [(1, 13 * i % length, 1) for i in range(others)]
            if not _alike(step(stack, [*crowd, (0, length - 1, 1)])[-1], whole):
                raise _wrong(ops, f"a step gives other bits among {others} sequences")
        if ops.divided:
            return  # a rank has a slice of the head
        for _ in range(3):  # plain, and recorded
            first, second = step.begin(), step.begin(np.array([-2, -1], np.int32))
            tokens, found = ops.collect(first).ids, ops.collect(second)
            known = ops.collect(step.begin(tokens[::-1]))
            if not (found.ids == known.ids).all() or not _alike(found.logits, known.logits):
                raise _wrong(ops, "a step with tokens that stayed on the device gives other bits")


class _Sequence:
    """Steps on a KV of two sequences. Runs are (sequence, tokens computed, rows); those of the
    first sequence write its KV, and nobody writes the other's, which is zeros."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tables = _tables(subject.length, subject.spec.block_size)
        self.kv = subject.ops.alloc_kv(replace(subject.spec, blocks=int(self._tables.max()) + 1))
        stack = subject.stack
        vocabulary = min(stack.vocabulary or stack.embed.rows, stack.embed.rows)
        random = np.random.default_rng(subject.length)
        self._tokens = random.integers(0, vocabulary, subject.length).astype(np.int32)

    def __call__(self, layers: Stack, runs: list[tuple[int, int, int]], every: bool = False) -> F32:
        """The last row of each run, or every row."""
        ops = self._subject.ops
        return ops.to_numpy(ops.hidden(layers, self._batch(runs, every), self.kv, None))

    def begin(self, tokens: I32 | None = None) -> Any:
        """A step of the last row of each sequence, whose likeliest tokens are chosen; for
        `collect`. tokens: in place of those of the sequence."""
        zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
        greedy: Draw = zeros, np.zeros(2, np.int32), ones, zeros, zeros
        last, subject = self._subject.length - 1, self._subject
        batch = self._batch([(1, last, 1), (0, last, 1)])
        batch = batch if tokens is None else replace(batch, tokens=tokens)
        return subject.ops.launch_step(subject.stack, batch, self.kv, None, subject.head, greedy)

    def _batch(self, runs: list[tuple[int, int, int]], every: bool = False) -> Batch:
        batch, block = _batch(self._tables, runs), self._subject.spec.block_size
        rows = np.arange(len(batch.positions), dtype=np.int32)
        mine = np.repeat([sequence == 0 for sequence, *_ in runs], [n for *_, n in runs])
        slots = np.where(mine, _slots(self._tables[0], batch.positions, block), -1).astype(np.int32)
        wanted = rows if every else batch.logit_rows
        return replace(batch, tokens=self._tokens[batch.positions], slots=slots, logit_rows=wanted)


@contextmanager
def _sequence(subject: Subject) -> Iterator[_Sequence]:
    ops = subject.ops
    found = _Sequence(subject)
    try:
        yield found
    finally:
        if ops.graphs is not None:
            ops.graphs.release()  # they are of this KV
        ops.free_kv(found.kv)
        ops.begin()


def _batch(tables: I32, runs: list[tuple[int, int, int]]) -> Batch:
    """A step of runs (row of the tables, tokens computed, rows). Their last rows are wanted."""
    counts = [n for *_, n in runs]
    positions = np.concatenate([np.arange(done, done + n, dtype=np.int32) for _, done, n in runs])
    contexts = np.array([done + n for _, done, n in runs], np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return Batch(
        np.zeros(len(positions), np.int32),
        positions,
        starts,
        contexts,
        np.ascontiguousarray(tables[[sequence for sequence, *_ in runs]]),
        np.full(len(positions), -1, np.int32),
        starts[1:] - 1,
    )


# -- from logits to tokens -------------------------------------------------------------------------
def _edits(ops: GpuOps, vocabulary: int) -> None:
    """Every operation, the masks of a row, and both."""
    random = np.random.default_rng(vocabulary)
    logits = random.standard_normal((4, vocabulary), np.float32)
    ids = [int(one) for one in random.integers(0, vocabulary, 9)]
    twice = [*ids, ids[0]]
    edits = [
        [Edit(Operation.ADD, twice, [0.3] * len(twice)), Edit(Operation.REPETITION, ids, 1.3)],
        [Edit(Operation.FREQUENCY, twice, 0.7), Edit(Operation.PRESENCE, ids, 0.2)],
        [Edit(Operation.FORBID, ids)],
        [Edit(Operation.ALLOW, ids), Edit(Operation.FORCE, ids[:3], 1.5)],
    ]
    words = -(-vocabulary // 64)
    allowed = random.integers(0, 1 << 63, (4, words), np.uint64)
    expected = logits.copy()
    apply_edits(expected, allowed, edits)
    ops.begin()
    on_device = ops.on_device(logits)
    edit_on_device(ops, on_device, allowed, edits)
    if not _alike(ops.to_numpy(on_device), expected):
        raise _wrong(ops, "edits or masks of logits are wrong")


def _draws(ops: GpuOps, vocabulary: int) -> None:
    """Draws of every kind, and the last row alone."""
    logits, draw, expected, sure = draws_of(vocabulary)
    ops.begin()
    found = ops.sample(logits, *draw)
    ops.begin()
    temperature, top_k, top_p, min_p, uniform = draw
    last: Draw = temperature[-1:], top_k[-1:], top_p[-1:], min_p[-1:], uniform[-1:]
    alone = ops.sample(logits[-1:], *last)
    if not (found[sure] == expected[sure]).all() or alone[0] != found[-1]:
        raise _wrong(ops, "tokens are not drawn as numpy draws them")


def draws_of(vocabulary: int) -> tuple[F32, Draw, I32, NDArray[np.bool_]]:
    """Logits, parameters and the tokens that numpy draws by them; and of which rows it draws the
    same within MARGIN of every bound, so that exponentials which differ in the last digits cannot
    change them."""
    random = np.random.default_rng(vocabulary)
    logits = 8 * random.standard_normal((DRAWS, vocabulary), np.float32)
    some = np.arange(DRAWS)
    temperature = np.where(some % 6 == 0, 0, 0.7 + 0.1 * (some % 4)).astype(np.float32)
    top_k = np.where(some % 3 == 1, 1 + some, 0).astype(np.int32)
    top_p = np.where(some % 4 > 1, 0.3 + 0.05 * some, 1.0).astype(np.float32)
    min_p = np.where(some % 5 == 3, 0.02, 0.0).astype(np.float32)
    uniform = random.random(DRAWS, np.float32)

    def drawn(by: float) -> I32:
        near = (
            np.where(top_p < 1, top_p + by, 1),
            min_p * (1 + by),
            np.clip(uniform + by, 0, 0.999999),
        )
        p, least, at = (one.astype(np.float32) for one in near)
        return _HOST.sample(logits, temperature, top_k, p, least, at)

    expected = drawn(0)
    sure = (expected == drawn(-MARGIN)) & (expected == drawn(MARGIN))
    return logits, (temperature, top_k, top_p, min_p, uniform), expected, sure


def _adapter(ops: GpuOps, stack: Stack, kind: str) -> None:
    """Test an adapter's additions to rows of a product and to embedded tokens, beside a row without
    one."""
    random, layer, width = np.random.default_rng(7), stack.layers[0], stack.embed.columns
    vocabulary = stack.vocabulary or stack.embed.rows  # a rank has a slice of the table alone
    rows, columns = layer.o.rows, layer.o.columns
    x = random.standard_normal((3, columns), np.float32)
    y, e = (random.standard_normal((3, n), np.float32) for n in (rows, width))
    tokens = np.array([0, vocabulary - 1, 1], np.int32)
    for rank in RANKS:

        def pair(
            outputs: int, inputs: int, *, of_tokens: bool = False, rank: int = rank
        ) -> LowRank:
            first = (inputs, rank) if of_tokens else (rank, inputs)
            a, b = (random.standard_normal(one, np.float32) for one in (first, (outputs, rank)))
            return LowRank(_as_kind(a, kind), _as_kind(b, kind), 0.5 / rank)

        layers = ({"o": pair(rows, columns)}, *({} for _ in stack.layers[1:]))
        weights = AdapterWeights(kind, layers, pair(width, vocabulary, of_tokens=True))
        mine, theirs = ops.pack_adapter(weights, stack), _HOST.pack_adapter(weights, stack)
        which, reference = [mine, None, mine], [theirs, None, theirs]
        ops.begin()
        narrow = ops.launches.cast(ops.on_device(x), layer.o.compute)
        added = ops.to_numpy(ops.adapt(ops.on_device(y), narrow, which, 0, "o"))
        expected = _HOST.adapt(y.copy(), _rounded(x, layer.o.compute), reference, 0, "o")
        embedded = ops.to_numpy(ops.adapt_embedded(ops.on_device(e), tokens, which))
        for found, right in (
            (added, expected),
            (embedded, _HOST.adapt_embedded(e, tokens, reference)),
        ):
            if not (np.abs(found - right) <= ADAPTER_BOUND * np.abs(right).max()).all():
                raise _wrong(ops, f"what an adapter of rank {rank} adds is wrong")


def _as_kind(values: F32, kind: str) -> NDArray[Any]:
    """Values of a file's kind, bf16 as bits."""
    return (
        to_bf16(values)
        if kind == "BF16"
        else values.astype(np.float16 if kind == "F16" else np.float32)
    )


# -- helpers ---------------------------------------------------------------------------------------
def _mixed(ops: GpuOps, kv: GpuKV, q: F32, batch: Batch, shape: AttentionShape) -> F32:
    ops.begin()
    return ops.to_numpy(ops.attention(ops.on_device(q), kv, LAYER, batch, shape))


def _multiplied(ops: GpuOps, x: F32, matrix: Matrix, places: tuple[int, ...]) -> list[F32]:
    """Rows of a product at these places. They alone are copied: heads have many outputs."""
    ops.begin()
    out, n = ops.linear(ops.on_device(x), matrix), matrix.rows
    return [ops.to_numpy(GpuArray(out.address + 4 * n * place, (1, n)))[0] for place in places]


def _alike(one: F32, other: F32) -> bool:
    return bool((one.view(np.uint32) == other.view(np.uint32)).all())


def _rounded(x: F32, kind: str) -> F32:
    if kind == "bf16":
        return widened("BF16", to_bf16(x))
    return x.astype(np.float16).astype(np.float32) if kind == "fp16" else x
