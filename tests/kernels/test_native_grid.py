"""Each operation of the native backend against the reference, on odd shapes, with a bound per operation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from grid import (
    KINDS,
    batch,
    close,
    fill_kv,
    history,
    i32,
    kv_rows,
    kv_spec,
    layer,
    normal,
    rng,
    rope_tables,
    values_of,
    vector,
    weight,
)

from pageturner.formats.ggml import QUANTISED
from pageturner.kernels.base import KV_TYPES, AttentionShape, KVSpec
from pageturner.kernels.choosing import Head
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps
from support.poison import poison_blocks

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (37, 96), (100, 576), (576, 1536)])
def test_linear(ops: NativeOps, kind: str, n: int, k: int) -> None:
    k = -(-k // values_of(kind)) * values_of(kind)
    w = weight(kind, n, k)
    packed, plain = ops.pack_weight(w), REFERENCE.pack_weight(w)
    for rows in (1, 2, 5, 6, 7, 13, 32):
        x, bias = normal(rows, k, seed=rows), normal(n, seed=3)
        close(ops.linear(x, packed), REFERENCE.linear(x, plain), 2e-5)
        close(ops.linear(x, packed, bias), REFERENCE.linear(x, plain, bias), 2e-5)


@pytest.mark.parametrize("k", [1, 7, 33, 100])
def test_linear_of_floats_takes_any_width(ops: NativeOps, k: int) -> None:
    w, x = weight("F32", 19, k), normal(9, k)
    close(ops.linear(x, ops.pack_weight(w)), REFERENCE.linear(x, REFERENCE.pack_weight(w)), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_is_exact(ops: NativeOps, kind: str) -> None:
    w = weight(kind, 83, max(96, 2 * values_of(kind)))
    tokens = i32([0, 82, 16, 15, 40, 40])
    expected = REFERENCE.embed(REFERENCE.pack_weight(w), tokens)
    assert np.array_equal(ops.embed(ops.pack_weight(w), tokens), expected)


def test_extreme_quantised_weights_do_not_overflow(ops: NativeOps) -> None:
    integers = {"Q4_1": slice(4, None), "Q5_1": slice(4, None), "Q6_K": slice(0, 192)}
    integers |= {
        "Q4_K": slice(16, None),
        "Q5_K": slice(16, None),
    }  # in the others they follow the scale
    integers |= {
        "Q3_K": slice(0, 108),
        "MXFP4": slice(1, None),
        "TQ1_0": slice(0, 52),
        "TQ2_0": slice(0, 64),
    }
    integers |= {"Q4_W": slice(8, None), "Q8_W": slice(8, None), "T4_W": slice(20, None)}
    for kind, fill in itertools.product(QUANTISED, (0x00, 0x7F, 0x80, 0xFF)):
        k = max(64, values_of(kind))
        w = weight(kind, 16, k)
        w.data.reshape(16 * k // values_of(kind), -1)[:, integers.get(kind, slice(2, None))] = fill
        x = np.full((7, k), 3.0, np.float32) * np.where(np.arange(7) % 2, 1, -1)[:, None].astype(
            np.float32
        )
        close(
            ops.linear(x, ops.pack_weight(w)), REFERENCE.linear(x, REFERENCE.pack_weight(w)), 2e-5
        )


def test_zero_activations_give_zero(ops: NativeOps) -> None:
    out = ops.linear(np.zeros((3, 64), np.float32), ops.pack_weight(weight("Q4_1", 20, 64)))
    assert np.array_equal(out, np.zeros((3, 20), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_one_row_stays_there_and_is_not_lost(ops: NativeOps, kind: str) -> None:
    k = max(64, values_of(kind))
    x = normal(8, k)
    x[3, 40] = np.nan
    out = ops.linear(x, ops.pack_weight(weight(kind, 33, k)))
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()


@pytest.mark.parametrize("n", [1, 8, 31, 64, 576])
def test_norm(ops: NativeOps, n: int) -> None:
    x, w = normal(7, n) * 10, normal(n, seed=1)
    close(ops.norm(x, w, 1e-5), REFERENCE.norm(x, w, 1e-5), 3e-6)
    heads = normal(5, 4 * n)
    close(ops.head_norm(heads, w, 1e-6, n), REFERENCE.head_norm(heads, w, 1e-6, n), 3e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("half", [8, 5])
def test_rope(ops: NativeOps, interleaved: bool, half: int) -> None:
    x, positions = normal(6, 3 * 16), i32([0, 1, 99, 7, 7, 50])
    tables = rope_tables(100, half, interleaved)
    close(ops.rope(x, positions, tables, 16), REFERENCE.rope(x, positions, tables, 16), 1e-6)


def test_act_mul_and_add(ops: NativeOps) -> None:
    x, y = normal(5, 37) * 30, normal(5, 37, seed=1)
    x[0, :4] = [0, -200, 200, -90]
    close(ops.act_mul(x, y), REFERENCE.act_mul(x, y), 1e-6)
    assert np.array_equal(ops.add(x.copy(), y), x + y)


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (7, 1, 8), (16, 2, 80)]
)
def test_attention(
    ops: NativeOps, dtype: str, block_size: int, heads: int, kv_heads: int, dim: int
) -> None:
    runs = [(0, 1), (3, 1), (0, 19), (250, 9), (511, 1), (530, 3), (17, 1)]
    blocks = sum(-(-(c + n) // block_size) for c, n in runs) + 1
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5)
    b, whole = batch(runs, block_size, blocks), batch(history(runs), block_size, blocks)
    q, out = normal(len(b.positions), heads * dim) * 3, []
    for backend in (ops, REFERENCE):
        kv = backend.alloc_kv(kv_spec(block_size, blocks, kv_heads, dim, dtype))
        poison_blocks(kv, list(range(blocks)))
        fill_kv(backend, kv, whole, kv_heads * dim)
        out.append(backend.attention(q, kv, 0, b, shape))
    close(out[0], out[1], 1e-5)


KIND_SETS = [{"": kind} for kind in KINDS] + [
    {"": "Q4_1", "v": "Q8_0", "down": "F32", "up": "Q8_0", "o": "F16"},
    {"": "Q4_K", "v": "Q6_K", "down": "Q6_K", "o": "Q5_0", "k": "Q5_K", "up": "Q5_1"},
]


@pytest.mark.parametrize("kinds", KIND_SETS, ids=lambda k: "-".join(k.values()))
@pytest.mark.parametrize("qwen", [False, True])
def test_composites_equal_their_default_bodies_bit_for_bit(
    ops: NativeOps, kinds: dict[str, str], qwen: bool
) -> None:
    shape = AttentionShape(8, 2, 32, 32**-0.5)
    wide = any(values_of(kind) == 256 for kind in kinds.values())
    hidden, inner = (256, 512) if wide else (96, 160)
    made = layer(ops, kinds, hidden, inner, shape, qwen)
    b = batch([(0, 5), (20, 1), (250, 12), (300, 1)], 16, 60)
    x = normal(len(b.positions), hidden)
    out, stored = [], []
    for attention, mlp in (
        (ops.attention_block, ops.mlp_block),
        (Composites.attention_block.__get__(ops), Composites.mlp_block.__get__(ops)),
    ):
        kv = ops.alloc_kv(kv_spec(16, 60, 2, 32, "float16"))
        fill_kv(ops, kv, batch(history([(0, 5), (20, 1), (250, 12), (300, 1)]), 16, 60), 64)
        h = attention(x.copy(), made, kv, 0, b)
        stored.append(ops.attention(normal(len(b.positions), 256), kv, 0, b, shape))
        out.append((h.copy(), mlp(h, made)))
    assert np.array_equal(out[0][0], out[1][0])
    assert np.array_equal(out[0][1], out[1][1])
    assert np.array_equal(stored[0], stored[1])
    assert not np.array_equal(out[0][0], x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_close_to_the_reference(ops: NativeOps, kind: str) -> None:
    shape = AttentionShape(8, 2, 32, 32**-0.5)
    hidden, inner = (256, 512) if values_of(kind) == 256 else (96, 160)
    runs = [(0, 5), (20, 1), (250, 12)]
    b, x, out = batch(runs, 16, 60), normal(18, hidden), []
    for backend in (ops, REFERENCE):
        made = layer(backend, {"": kind}, hidden, inner, shape)
        kv = backend.alloc_kv(kv_spec(16, 60, 2, 32, "float32"))
        fill_kv(backend, kv, batch(history(runs), 16, 60), 64)
        h = backend.attention_block(x.copy(), made, kv, 0, b)
        out.append(backend.mlp_block(h, made))
    # An activation on the edge between two integers may round the other way: 1/127 of a product, in few rows.
    close(out[0], out[1], 1e-4 if kind in ("F32", "F16", "BF16") else 5e-2)
    typical = np.argsort(np.abs(out[0] - out[1]).max(axis=1))[:14]
    close(out[0][typical], out[1][typical], 1e-4)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_logits_equal_norm_and_linear(ops: NativeOps, kind: str) -> None:
    head, w = ops.pack_weight(weight(kind, 333, 64)), ops.pack_weight(vector(64))
    x = normal(9, 64)
    assert np.array_equal(
        ops.logits(x, Head(w, 1e-5, head)), ops.linear(ops.norm(x, w, 1e-5), head)
    )


def test_wide_mlp_batches_pass_in_slices(ops: NativeOps) -> None:
    made = layer(ops, {"": "Q4_1"}, 64, 96, AttentionShape(2, 2, 32, 1.0))
    x = normal(1100, 64)
    assert np.array_equal(
        ops.mlp_block(x.copy(), made), Composites.mlp_block.__get__(ops)(x.copy(), made)
    )


def test_copied_blocks_read_the_same(ops: NativeOps) -> None:
    kv = ops.alloc_kv(kv_spec(16, 8, 2, 32, "float16"))
    shape = AttentionShape(2, 2, 32, 0.2)
    b = batch([(30, 1)], 16, 4)
    fill_kv(ops, kv, batch([(0, 31)], 16, 4), 64)
    q = normal(1, 64)
    before = ops.attention(q, kv, 0, b, shape)
    pairs = [(int(old), 5 + i) for i, old in enumerate(b.block_table[0, :2])]
    ops.copy_blocks(kv, pairs)
    poison_blocks(kv, [old for old, _ in pairs])
    b.block_table[0, :2] = [5, 6]
    assert np.array_equal(ops.attention(q, kv, 0, b, shape), before)


def test_rows_without_a_slot_are_not_written(ops: NativeOps) -> None:
    kv = ops.alloc_kv(kv_spec(4, 4, 1, 16, "float32"))
    k, v = kv_rows(batch([(0, 3)], 4, 3), 16, 1)
    ops.kv_write(kv, 0, k, v, i32([4, -1, 5]))
    b = batch([(2, 1)], 4, 4)
    b.block_table[0, :1] = [1]
    shape, q = AttentionShape(1, 1, 16, 1.0), np.zeros((1, 16), np.float32)
    np.testing.assert_allclose(ops.attention(q, kv, 0, b, shape)[0], (v[0] + v[2]) / 3, rtol=1e-6)


def test_fp16_rounds_like_numpy(ops: NativeOps) -> None:
    edges = np.array(
        [0, -0.0, np.inf, 65519.9, 65520, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001], np.float32
    )
    scaled = [normal(64) * np.float32(s) for s in (1, 1e-4, 1e-6, 6e-8, 1e4, 1e5)]
    values = np.concatenate([*scaled, edges])
    values = np.resize(values, (len(values) // 8 * 8, 8)).astype(np.float32)
    kv = ops.alloc_kv(kv_spec(1, len(values), 1, 8, "float16"))
    ops.kv_write(kv, 0, np.zeros_like(values), values, i32(np.arange(len(values))))
    out = np.empty_like(values)
    for i in range(len(values)):  # softmax over one token gives its V back
        b = batch([(0, 1)], 1, 2)
        b.block_table[0, 0] = i
        out[i] = ops.attention(np.zeros((1, 8), np.float32), kv, 0, b, AttentionShape(1, 1, 8, 1.0))
    with np.errstate(over="ignore"):
        assert np.array_equal(out, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("block_size", [1, 16])
def test_int8_rounds_like_the_reference(ops: NativeOps, block_size: int) -> None:
    """Each head of each token by a scale of its own. Softmax over one token gives V back."""
    values = normal(48, 2 * 24) * np.exp(rng(2).uniform(-20, 20, (48, 1))).astype(np.float32)
    values[:, 24:] *= 1000
    values[3, :24] = 0
    q, shape, out = np.zeros((48, 48), np.float32), AttentionShape(2, 2, 24, 1.0), []
    for backend in (ops, REFERENCE):
        kv = backend.alloc_kv(kv_spec(block_size, 48 // block_size * 48, 2, 24, "int8"))
        b = batch([(0, 1)] * 48, block_size, 48 // block_size * 48)
        backend.kv_write(kv, 0, values, values, b.slots)
        out.append(backend.attention(q, kv, 0, b, shape))
    assert np.array_equal(out[0], out[1])
    error = np.abs(out[0] - values).reshape(48, 2, 24).max(axis=2)
    assert (error <= np.abs(values).reshape(48, 2, 24).max(axis=2) / 253).all()
    assert error.max() > 0


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_int8_does_not_lose_what_is_no_number(ops: NativeOps, odd: float) -> None:
    kv = ops.alloc_kv(kv_spec(16, 2, 2, 32, "int8"))
    b = batch([(0, 3)], 16, 2)
    k, v = kv_rows(b, 64, 1)
    k[1, 5], v[2, 40] = odd, odd
    ops.kv_write(kv, 0, k, v, b.slots)
    out = ops.attention(normal(3, 64), kv, 0, b, AttentionShape(2, 2, 32, 1.0)).reshape(3, 2, 32)
    assert np.isnan(out[1:, 0]).all()
    assert np.isnan(out[2, 1]).all()
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, 1]).all()


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_kv_takes_the_bytes_that_its_spec_says(ops: NativeOps, dtype: str) -> None:
    for block_size, dim in ((16, 64), (1, 8), (5, 24)):
        spec = KVSpec(3, 7, block_size, 2, dim, dtype)
        assert ops.alloc_kv(spec).nbytes == spec.nbytes


def test_exp_of_the_softmax_is_accurate(ops: NativeOps) -> None:
    x = np.sort(-rng(1).uniform(0, 80, (1, 4096)).astype(np.float32))
    lse, _, logprobs = ops.top_logprobs(x, 10)
    true = np.log(np.exp((x - x.max()).astype(np.float64)).sum()) + x.max()
    assert abs(lse[0] - true) < 1e-5
    assert np.abs(logprobs[0] - np.sort(x[0])[::-1][:10] + true).max() < 1e-5
