"""What other families than Llama need, natively: windows, chunks, slopes, sinks, a latent KV, other norms,
multipliers and activations, and experts. Against the reference, against the default bodies of the composites bit
for bit, and against itself on other threads, blocks and chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from grid import (
    batch,
    close,
    fill_kv,
    history,
    i32,
    kv_rows,
    layer,
    normal,
    rope_tables,
    vector,
    weight,
)

from pageturner.kernels.base import GATED, KV_TYPES, AttentionShape, Batch, KVSpec, Layer, Ops
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.layer_parts import Experts, Latent
from pageturner.kernels.reference import ReferenceOps
from support.poison import poison_blocks

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()
SLOPES = (0.5, 0.25, 0.0, 1.0, 0.01, 0.03)
SINKS = (0.5, -3.0, 8.0, 0.0, 20.0, -20.0)
PLAIN = AttentionShape(6, 2, 32, 32**-0.5)
LATENT = AttentionShape(6, 1, 40, 40**-0.5, latent=32)  # of 32 numbers, and a rotary key of 8
NEWER = {
    "chunk7": replace(PLAIN, window=7, chunked=True),
    "chunk300": replace(PLAIN, window=300, chunked=True),
    "sinks": replace(PLAIN, sinks=SINKS),
    "sinks and window": replace(PLAIN, sinks=SINKS, window=40, soft_cap=1.5),
    "latent": LATENT,
    "latent and sinks": replace(LATENT, sinks=SINKS, window=40, chunked=True),
}
SHAPES = NEWER | {
    "window1": replace(PLAIN, window=1),
    "window7": replace(PLAIN, window=7),
    "window300": replace(PLAIN, window=300),
    "cap": replace(PLAIN, soft_cap=2.0),
    "slopes": replace(PLAIN, slopes=SLOPES),
    "all": replace(PLAIN, window=40, soft_cap=1.5, slopes=SLOPES),
}
RUNS = [(0, 1), (3, 1), (0, 19), (250, 9), (511, 1), (530, 30), (17, 1), (600, 1)]


# -- attention -----------------------------------------------------------------------------------------------


def storage(ops: Ops, shape: AttentionShape, blocks: int, block_size: int, dtype: str) -> Any:
    spec = KVSpec(1, blocks, block_size, shape.kv_heads, shape.head_dim, dtype, shape.latent > 0)
    kv = ops.alloc_kv(spec)
    poison_blocks(kv, list(range(blocks)))
    return kv


def fill(ops: Ops, kv: Any, whole: Batch, shape: AttentionShape) -> None:
    k, v = kv_rows(whole, shape.kv_heads * shape.head_dim, 0)
    ops.kv_write(kv, 0, k, None if shape.latent else v, whole.slots)


def attend(
    ops: Ops,
    runs: list[tuple[int, int]],
    block_size: int,
    dtype: str,
    shape: AttentionShape,
    trimmed: bool = False,
) -> np.ndarray:
    """With `trimmed`, blocks that no row sees any more are poisoned, and tables name another."""
    blocks = sum(-(-(c + n) // block_size) for c, n in runs) + 2
    kv = storage(ops, shape, blocks, block_size, dtype)
    fill(ops, kv, batch(history(runs), block_size, blocks - 1), shape)
    b = batch(runs, block_size, blocks - 1)
    for s, (computed, _) in enumerate(runs if trimmed else []):
        chunk = computed // shape.window * shape.window
        first = chunk if shape.chunked else max(0, computed + 1 - shape.window)
        gone = first // block_size
        poison_blocks(kv, b.block_table[s, :gone].tolist())
        b.block_table[s, :gone] = blocks - 1
    q = [
        normal(c + n, shape.heads * shape.head_dim, seed=50 + s)[c:]
        for s, (c, n) in enumerate(runs)
    ]
    return np.asarray(ops.attention(3 * np.concatenate(q), kv, 0, b, shape))


@cache
def meant(name: str, dtype: str) -> np.ndarray:
    """What the definition makes of RUNS, which knows no blocks."""
    return attend(REFERENCE, RUNS, 16, dtype, SHAPES[name])


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(ops: NativeOps, name: str, block_size: int) -> None:
    shape = SHAPES[name]
    for dtype in KV_TYPES:
        expected = meant(name, dtype)
        got = attend(ops, RUNS, block_size, dtype, shape)
        assert got.shape == (len(expected), shape.heads * (shape.latent or shape.head_dim))
        close(got, expected, 1e-5)
        if shape.window:
            assert np.array_equal(attend(ops, RUNS, block_size, dtype, shape, trimmed=True), got)


def test_a_latent_as_large_as_they_are(ops: NativeOps) -> None:
    """DeepSeek-V2-Lite's: 16 heads over 512 numbers and a rotary key of 64."""
    shape, runs = AttentionShape(16, 1, 576, 192**-0.5, latent=512), [(0, 3), (30, 1), (255, 2)]
    close(
        attend(ops, runs, 16, "float16", shape), attend(REFERENCE, runs, 16, "float16", shape), 2e-5
    )


CUTS = [(1, (16, 37)), (3, (5, 256)), (2, (64, 100))]  # threads, and sizes of blocks and chunks
MANY_CUTS = list(product((1, 2, 3), ((16, 570), (16, 37), (5, 256), (256, 255), (64, 8))))
PLACES = (0, 6, 7, 255, 256, 299, 300, 301, 319, 512, 555, 569)


@pytest.mark.parametrize(
    ("name", "length", "cuts"),
    [
        *((name, 320, CUTS) for name in NEWER),
        *(
            pytest.param(name, 570, MANY_CUTS, marks=pytest.mark.slow)
            for name in ("all", "window7", "window300")
        ),
    ],
)
def test_attention_does_not_depend_on_blocks_threads_or_chunks(
    ops: NativeOps, name: str, length: int, cuts: list[tuple[int, tuple[int, int]]]
) -> None:
    shape = SHAPES[name]
    expected = attend(ops, [(0, length)], 16, "float16", shape)
    for threads, (block_size, chunk) in cuts:
        other = NativeOps(threads, ops.isa)
        for start in range(0, length, chunk):
            n = min(chunk, length - start)
            out = attend(other, [(start, n)], block_size, "float16", shape)
            assert np.array_equal(out, expected[start : start + n])
        for position in (place for place in PLACES if place < length):
            out = attend(other, [(position, 1)], block_size, "float16", shape)
            assert np.array_equal(out[0], expected[position])


def test_neighbours_that_share_their_beginning(ops: NativeOps) -> None:
    """A shared prefix is read once for all of them, whose sinks are their own heads'."""
    for shape in (SHAPES["sinks"], SHAPES["latent and sinks"]):
        shape = replace(shape, window=0, chunked=False)
        runs, alone = [(530, 1)] * 4, []
        blocks = -(-531 // 16) + 8
        kv = storage(ops, shape, blocks, 16, "float16")
        whole = batch([(0, 531)], 16, blocks)
        fill(ops, kv, whole, shape)
        q = normal(4, shape.heads * shape.head_dim)
        b = batch([(530, 1)], 16, blocks)
        for row in q:
            alone.append(ops.attention(row[None], kv, 0, b, shape)[0])
        table = np.repeat(b.block_table, 4, axis=0)
        together = Batch(
            i32([0] * 4),
            i32([530] * 4),
            i32(range(5)),
            i32([531] * 4),
            i32(table),
            i32([-1] * 4),
            i32(range(4)),
        )
        assert len(runs) == 4
        assert np.array_equal(ops.attention(q, kv, 0, together, shape), np.stack(alone))


def test_a_latent_kv_takes_what_it_says(ops: NativeOps) -> None:
    for dtype in KV_TYPES:
        plain, latent = (KVSpec(2, 3, 16, 1, 40, dtype, latent) for latent in (False, True))
        assert 2 * latent.nbytes == plain.nbytes
        assert ops.alloc_kv(latent).nbytes == latent.nbytes
    kv = ops.alloc_kv(KVSpec(1, 4, 16, 1, 40, "float32", True))
    ops.kv_write(kv, 0, normal(16, 40), None, i32(range(16)))
    ops.copy_blocks(kv, [(0, 3)])
    assert np.array_equal(kv.memory[0], kv.memory[3])
    with pytest.raises(ValueError, match="latent"):
        ops.kv_write(kv, 0, normal(16, 40), normal(16, 40), i32(range(16)))


# -- primitives ----------------------------------------------------------------------------------------------


def test_clamped_swiglu(ops: NativeOps) -> None:
    gate = np.linspace(-120, 120, 4001, dtype=np.float32).reshape(1, -1)
    up = np.linspace(9, -9, 4001, dtype=np.float32).reshape(1, -1)
    g, u = np.minimum(gate, 7).astype(np.float64), np.clip(up, -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    for backend in (ops, REFERENCE):
        np.testing.assert_allclose(
            backend.clamped_swiglu(gate, up), expected, rtol=1e-5, atol=1e-33
        )
    for width in (1, 5, 13):
        short = ops.clamped_swiglu(gate[:, -width:].copy(), up[:, -width:].copy())
        assert np.array_equal(short, ops.clamped_swiglu(gate, up)[:, -width:])


def test_routing_by_sigmoid(ops: NativeOps) -> None:
    logits = normal(40, 9) * 5
    ids, weights = ops.route(logits, 3, False, "sigmoid")
    expected_ids, expected = REFERENCE.route(logits, 3, False, "sigmoid")
    assert np.array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    chosen = np.take_along_axis(logits, ids, 1).astype(np.float64)
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-chosen)), rtol=2e-6)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_heads_with_matrices_of_their_own(ops: NativeOps, kind: str) -> None:
    x = normal(19, 3 * 64)

    def product(backend: Ops) -> np.ndarray:
        weights = tuple(backend.pack_weight(weight(kind, 24, 64, seed=i)) for i in range(3))
        each = [
            backend.linear(np.ascontiguousarray(x[:, 64 * i :][:, :64]), w)
            for i, w in enumerate(weights)
        ]
        got = backend.head_linear(x, weights)
        assert np.array_equal(got, np.hstack(each))
        return np.asarray(got)

    close(product(ops), product(REFERENCE), 1e-5 if kind in ("F32", "BF16") else 2e-2)
    a, b = normal(5, 12), normal(5, 6)
    joined = np.hstack([a[:, :4], b[:, :2], a[:, 4:8], b[:, 2:4], a[:, 8:], b[:, 4:]])
    for backend in (ops, REFERENCE):
        assert np.array_equal(backend.join_heads(a, b, 3), joined)
        rows = backend.scale_rows(a.copy(), np.float32([1, 2, 0.5]), i32([2, 0, 1, 1, 0]))
        assert np.array_equal(rows, a * np.float32([0.5, 1, 2, 2, 1])[:, None])


# -- layers --------------------------------------------------------------------------------------------------


def made_layer(ops: Ops, name: str, kind: str) -> Layer:
    """A layer of hidden size 96 and 160 inner columns with what the family adds."""
    shape = {
        "llama4": replace(PLAIN, window=40, chunked=True),
        "gpt-oss": replace(PLAIN, sinks=SINKS),
        "deepseek": LATENT,
        "gemma": replace(PLAIN, window=40, soft_cap=50.0),
        "bloom": replace(PLAIN, slopes=SLOPES),
    }.get(name, PLAIN)
    made = layer(ops, {"": kind}, 96, 160, PLAIN)
    made.shape = shape
    small = {n: ops.pack_weight(vector(n, seed=n)) for n in (64, 96, 160, 192, 32)}
    if name == "olmo":
        made.attn_norm = made.mlp_norm = None
        made.attn_post_norm = made.mlp_post_norm = small[96]
        made.q_norm, made.k_norm, made.wide_qk_norm = small[192], small[64], True
    if name == "gemma":
        made.attn_post_norm = made.mlp_post_norm = small[96]
        made.act = "gelu_tanh"
    if name in ("gpt2", "bloom"):
        made.attn_norm_bias = made.mlp_norm_bias = made.o_bias = made.down_bias = small[96]
        made.up_bias, made.gate = small[160], None
        made.act = "gelu" if name == "gpt2" else "gelu_tanh"
        made.rope = rope_tables(600, 0, interleaved=False)
    if name == "opt":
        made.gate, made.act = None, "relu"
    if name == "granite":
        made.residual = 0.22
    if name == "nope":
        made.rope = rope_tables(600, 0, interleaved=False)
        made.attn_temperature = np.linspace(1, 2, 600, dtype=np.float32)
    if name in ("qwen3.5", "dense qwen3.5"):
        made.attn_gate = ops.pack_weight(weight(kind, 192, 96, seed=8))
    if name in ("llama4", "gpt-oss", "deepseek", "qwen3.5", "mixtral"):
        made.experts = experts(ops, name, kind)
    if name in ("gpt-oss", "mixtral"):
        made.gate = made.up = made.down = None
    if name == "gpt-oss":
        made.act = GATED
    if name == "deepseek":
        pack_latent(ops, made, kind)
    ops.prepare_layer(made)
    return made


def experts(ops: Ops, name: str, kind: str) -> Experts:
    packed = [
        tuple(ops.pack_weight(weight(kind, *size, seed=100 * i + e)) for e in range(4))
        for i, size in enumerate([(160, 96), (160, 96), (96, 160)])
    ]
    router = ops.pack_weight(weight("F32", 4, 96, seed=9))
    more: dict[str, Any] = {
        "deepseek": {"scale": 1.5},
        "llama4": {"scoring": "sigmoid", "weigh_input": True},
    }.get(name, {})
    if name == "qwen3.5":
        more = {"shared_switch": ops.pack_weight(weight("F32", 1, 96, seed=7))}
    if name == "gpt-oss":
        biases = [
            tuple(ops.pack_weight(vector(n, seed=n + e)) for e in range(4)) for n in (160, 160, 96)
        ]
        names = ("gate_bias", "up_bias", "down_bias")
        more = dict(zip(names, biases, strict=True)) | {"router_bias": ops.pack_weight(vector(4))}
    return Experts(router, *packed, 2, name in ("gpt-oss", "mixtral"), **more)


def pack_latent(ops: Ops, made: Layer, kind: str) -> None:
    """6 heads of queries of 32 and 8 rotary dimensions, that make values of 64."""

    def matrix(rows: int, columns: int, seed: int) -> Any:
        return ops.pack_weight(weight(kind, rows, columns, seed))

    made.q, made.k, made.v, made.o = matrix(192, 96, 1), matrix(32, 96, 2), None, matrix(96, 384, 3)
    made.rope = rope_tables(600, 4, interleaved=True)
    made.latent = Latent(
        matrix(48, 96, 4),
        matrix(8, 96, 5),
        ops.pack_weight(vector(32)),
        tuple(matrix(32, 32, 10 + h) for h in range(6)),
        tuple(matrix(64, 32, 20 + h) for h in range(6)),
    )


def step(ops: Ops, made: Layer, bodies: Any, runs: list[tuple[int, int]]) -> np.ndarray:
    kv = storage(ops, made.shape, 80, 16, "float32")
    whole = batch(history(runs), 16, 80)
    if made.latent:
        fill(ops, kv, whole, made.shape)
    else:
        fill_kv(ops, kv, whole, 64)
    b = batch(runs, 16, 80)
    x = normal(len(b.positions), 96)
    h = bodies.attention_block.__get__(ops)(x.copy(), made, kv, 0, b)
    return np.asarray(bodies.mlp_block.__get__(ops)(h, made))


STEPS = [(0, 5), (20, 1), (250, 12), (300, 1)]
LAYERS = {
    "olmo": {"no_norm", "wide_norm", "post_norm"},
    "granite": {"scale"},
    "nope": {"no_rotary", "attn_temperature"},
    "llama4": {"window", "chunks", "experts", "shared_expert", "scoring"},
    "gpt-oss": {"sinks", "activation", "experts", "expert_bias"},
    "deepseek": {"latent", "experts", "shared_expert", "scoring"},
    "dense qwen3.5": {"attn_gate"},
    "gemma": {"activation", "post_norm", "soft_cap", "window"},
    "gpt2": {"activation", "bias", "layer_norm", "no_rotary"},
    "bloom": {"activation", "alibi", "bias", "layer_norm", "no_rotary"},
    "opt": {"activation"},
    "mixtral": {"experts"},
    "qwen3.5": {"attn_gate", "experts", "shared_expert", "shared_switch"},
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(ops: NativeOps, name: str, kind: str) -> None:
    """The fused composites equal their default bodies bit for bit, and the reference closely."""
    made = made_layer(ops, name, kind)
    assert made.needs == LAYERS[name]
    fused = step(ops, made, NativeOps, STEPS)
    made.native_mlp = None
    assert np.array_equal(fused, step(ops, made, Composites, STEPS))
    expected = step(REFERENCE, made_layer(REFERENCE, name, kind), Composites, STEPS)
    close(fused, expected, 1e-4 if kind == "F32" else 3e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_do_not_depend_on_the_crowd(ops: NativeOps, name: str) -> None:
    together = step(ops, made_layer(ops, name, "Q8_0"), NativeOps, STEPS)
    for threads in (1, 3):
        other = NativeOps(threads, ops.isa)
        first = step(other, made_layer(other, name, "Q8_0"), NativeOps, STEPS[:1])
        assert np.array_equal(first, together[:5])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek", {"k": (31, 96)}),
        ("deepseek", {"o": (96, 383)}),
        ("deepseek", {"q": (191, 96)}),
        ("llama4", {"up": None}),
        ("gpt-oss", {"k": (63, 96)}),
        ("olmo", {"attn_post_norm": None}),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    ops: NativeOps, name: str, change: dict[str, Any]
) -> None:
    made = made_layer(ops, name, "F32")
    for part, shape in change.items():
        setattr(made, part, ops.pack_weight(weight("F32", *shape)) if shape else None)
    with pytest.raises(ValueError, match=r"latent|missing|^k$|^o$|^q$"):
        ops.prepare_layer(made)


@pytest.mark.parametrize("missing", ["q", "down", "attn_norm"])
def test_a_layer_without_a_needed_part_is_refused(ops: NativeOps, missing: str) -> None:
    made = layer(ops, {"": "F32"}, 64, 96, PLAIN)
    setattr(made, missing, None)
    with pytest.raises(ValueError, match="missing"):
        ops.prepare_layer(made)


@pytest.mark.parametrize("change", ["router", "gate", "down", "top_k"])
def test_experts_that_do_not_fit_are_refused(ops: NativeOps, change: str) -> None:
    made = made_layer(ops, "mixtral", "F32")
    other = ops.pack_weight(weight("F32", 5, 64))
    assert made.experts is not None
    wrong = {"router": other, "gate": (other,) * 4, "down": made.experts.down[:3], "top_k": 5}
    made.experts = replace(made.experts, **{change: wrong[change]})
    with pytest.raises(ValueError, match="expert"):
        ops.prepare_layer(made)


@pytest.mark.parametrize("part", ["q_rope", "k_rope", "norm", "k_up", "v_up"])
def test_a_latent_that_does_not_fit_is_refused(ops: NativeOps, part: str) -> None:
    made = made_layer(ops, "deepseek", "F32")
    assert made.latent is not None
    wrong = ops.pack_weight(vector(31) if part == "norm" else weight("F32", 7, 96))
    value = (wrong,) * 6 if part.endswith("_up") else wrong
    made.latent = replace(made.latent, **{part: value})
    with pytest.raises(ValueError, match="latent"):
        ops.prepare_layer(made)
    made.latent = replace(made.latent, k_up=(), v_up=())
    with pytest.raises(ValueError, match="latent"):
        ops.prepare_layer(made)


def test_positions_beyond_the_tables_are_refused(ops: NativeOps) -> None:
    """A layer without rotary embedding has a table of temperatures."""
    made = made_layer(ops, "nope", "F32")
    made.attn_temperature = np.ones(200, np.float32)
    ops.prepare_layer(made)
    with pytest.raises(ValueError, match="positions"):
        step(ops, made, NativeOps, STEPS)


def test_storage_of_the_other_sort_is_refused(ops: NativeOps) -> None:
    made = made_layer(ops, "deepseek", "F32")
    made.shape = replace(made.shape, latent=0)
    with pytest.raises(ValueError, match=r"KV|latent"):
        step(ops, made, NativeOps, STEPS)
