"""Batch invariance of the native backend: the same row gives the same bits alone and in any crowd, on any
number of threads, on blocks of any size, however its sequence was cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
from grid import KINDS, batch, fill_kv, history, kv_spec, layer, normal, values_of, weight

from pageturner.kernels.base import KV_TYPES, AttentionShape, Batch, Layer
from pageturner.kernels.choosing import Head
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.layer_parts import Experts
from support.poison import poison_blocks

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
SHAPE = AttentionShape(6, 2, 32, 32**-0.5)


ISAS = available_isas()  # the best one in every run, the others with the slow tests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(ISAS)
    ],
)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def crowd(isa: str) -> list[NativeOps]:
    return [NativeOps(threads, isa) for threads in (1, 2, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_product_do_not_depend_on_each_other(crowd: list[NativeOps], kind: str) -> None:
    k = max(96, values_of(kind))
    w, x = weight(kind, 100, k), normal(70, k)
    expected = crowd[0].linear(x, crowd[0].pack_weight(w))
    for ops in crowd:
        packed = ops.pack_weight(w)
        for rows in range(1, 71):
            assert np.array_equal(ops.linear(x[:rows], packed), expected[:rows])
        for row in range(0, 70, 7):
            assert np.array_equal(ops.linear(x[row : row + 1], packed)[0], expected[row])


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q6_K"])
def test_many_rows_in_blocks_equal_few(crowd: list[NativeOps], kind: str) -> None:
    """More rows than stay in L2 at once."""
    w, x = weight(kind, 48, 1536), normal(130, 1536)
    packed = crowd[0].pack_weight(w)
    whole = crowd[0].linear(x, packed)
    parts = [crowd[1].linear(x[i : i + 9], packed) for i in range(0, 130, 9)]
    assert np.array_equal(whole, np.concatenate(parts))


def attend(ops: NativeOps, runs: list[tuple[int, int]], block_size: int, dtype: str) -> np.ndarray:
    blocks = sum(-(-(c + n) // block_size) for c, n in runs) + 1
    kv = ops.alloc_kv(kv_spec(block_size, blocks, SHAPE.kv_heads, SHAPE.head_dim, dtype))
    poison_blocks(kv, list(range(blocks)))
    fill_kv(ops, kv, batch(history(runs), block_size, blocks), SHAPE.kv_heads * SHAPE.head_dim)
    q = np.concatenate([query(s, c, n) for s, (c, n) in enumerate(runs)])
    return np.asarray(ops.attention(q, kv, 0, batch(runs, block_size, blocks), SHAPE))


def query(sequence: int, first: int, n: int) -> np.ndarray:
    whole = normal(700, SHAPE.heads * SHAPE.head_dim, seed=50 + sequence)
    return 3 * whole[first : first + n]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "float32" else name
        for name in KV_TYPES
    ],
)
def test_attention_does_not_depend_on_blocks_threads_or_chunks(
    crowd: list[NativeOps], dtype: str
) -> None:
    length = 530
    expected = attend(crowd[0], [(0, length)], 16, dtype)
    for ops in crowd:
        for block_size in (1, 2, 7, 16, 64, 256):
            for chunk in (37, 255, 256, 530):
                for start in range(0, length, chunk):
                    if block_size in (2, 7) and start:
                        continue
                    n = min(chunk, length - start)
                    out = attend(ops, [(start, n)], block_size, dtype)
                    assert np.array_equal(out, expected[start : start + n])
        for position in (0, 1, 15, 16, 255, 256, 257, 511, 512, 529):
            assert np.array_equal(attend(ops, [(position, 1)], 16, dtype)[0], expected[position])


def test_attention_does_not_depend_on_the_crowd(crowd: list[NativeOps]) -> None:
    runs = [(0, 40), (100, 1), (255, 2), (512, 1), (256, 130), (3, 1), (530, 1), (0, 1)] + [
        (60, 1)
    ] * 20
    for ops in crowd:
        together = attend(ops, runs, 16, "float16")
        at = 0
        for s, (computed, n) in enumerate(runs):
            alone = [(0, 1)] * s + [
                (computed, n)
            ]  # the same place in the list: grid.py seeds by it
            assert np.array_equal(attend(ops, alone, 16, "float16")[s:], together[at : at + n])
            at += n


def cut(b: Batch, s: int) -> Batch:
    """One sequence of a batch, with its own blocks."""
    rows, n = slice(*b.query_start[s : s + 2]), b.query_start[s + 1] - b.query_start[s]
    start, last = np.array([0, n], np.int32), np.array([n - 1], np.int32)
    context, table = b.context_len[s : s + 1], b.block_table[s : s + 1]
    return Batch(b.tokens[rows], b.positions[rows], start, context, table, b.slots[rows], last)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("block_size", [16, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype",
    ["float16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "float32"))],
)
def test_attention_does_not_depend_on_who_shares_blocks(
    crowd: list[NativeOps], dtype: str, block_size: int, window: int
) -> None:
    """Neighbours with the same first blocks are computed together, as far as whole segments are the same."""
    shared = {  # sequence: whose blocks, up to which position
        1: (0, 530),
        2: (0, 600),
        3: (2, 512),
        4: (2, 511),
        6: (5, 256),
        7: (5, 256),
        8: (5, 255),
        10: (9, 1024),
        11: (9, 1000),
    }
    runs = [
        (700, 1),
        (560, 1),
        (640, 3),
        (520, 1),
        (600, 1),
        (256, 1),
        (255, 1),
        (300, 2),
        (300, 1),
        (1023, 1),
    ]
    runs += [(1100, 1), (1024, 40), (0, 1), (12, 3)] + [(1023, 1)] * 20
    shared |= dict.fromkeys(range(14, 34), (9, 1024))
    shape = AttentionShape(6, 2, 32, 32**-0.5, window=window)
    blocks = sum(-(-(c + n) // block_size) for c, n in runs) + 1
    whole, b = (batch(r, block_size, blocks) for r in (history(runs), runs))
    for s, (of, until) in shared.items():
        b.block_table[s, : until // block_size] = b.block_table[of, : until // block_size]
    q = np.concatenate([query(s, 0, n) for s, (_, n) in enumerate(runs)])
    for ops in crowd:
        kv = ops.alloc_kv(kv_spec(block_size, blocks, 2, 32, dtype))
        fill_kv(ops, kv, whole, 64)
        together = ops.attention(q, kv, 0, b, shape)
        for s in range(len(runs)):
            rows = slice(*b.query_start[s : s + 2])
            assert np.array_equal(ops.attention(q[rows], kv, 0, cut(b, s), shape), together[rows])


@pytest.mark.parametrize("kinds", [{"": "F32"}, {"": "Q4_1", "v": "Q8_0"}], ids=["F32", "Q4_1"])
@pytest.mark.parametrize("dtype", KV_TYPES)
def test_a_layer_computed_in_chunks_equals_the_whole(
    crowd: list[NativeOps], kinds: dict[str, str], dtype: str
) -> None:
    """Composites, with this step's own K and V read back from storage."""
    length, hidden = 300, 96
    x = normal(length, hidden)
    expected = None
    for ops in crowd:
        made = layer(ops, kinds, hidden, 160, SHAPE)
        for block_size, chunk in ((16, 300), (16, 1), (16, 7), (1, 64), (256, 50), (3, 299)):
            blocks = -(-length // block_size) + 1
            kv = ops.alloc_kv(kv_spec(block_size, blocks, 2, 32, dtype))
            poison_blocks(kv, list(range(blocks)))
            out = np.empty_like(x)
            for start in range(0, length, chunk):
                n = min(chunk, length - start)
                b = batch([(start, n)], block_size, blocks)
                h = ops.attention_block(x[start : start + n].copy(), made, kv, 0, b)
                out[start : start + n] = ops.mlp_block(h, made)
            expected = out if expected is None else expected
            assert np.array_equal(out, expected)
    assert expected is not None
    assert np.isfinite(expected).all()


def mixture(ops: NativeOps, kind: str, act: str) -> Layer:
    """A layer of 3 among 8 experts, with hidden size 96 and 64 inner columns."""
    made = layer(ops, {"": "F32"}, 96, 64, SHAPE)
    gates, ups, downs = (
        tuple(ops.pack_weight(weight(kind, *size, seed=100 * i + e)) for e in range(8))
        for i, size in enumerate([(64, 96), (64, 96), (96, 64)])
    )
    router = ops.pack_weight(weight("F32", 8, 96, seed=9))
    made.experts, made.act = Experts(router, gates, ups, downs, 3, normalise=act == "silu"), act
    made.gate = made.up = made.down = None
    ops.prepare_layer(made)
    return made


@pytest.mark.parametrize(("kind", "act"), [("F32", "silu"), ("Q8_0", "gelu"), ("Q4_1", "silu")])
def test_rows_through_experts_do_not_depend_on_the_crowd(
    crowd: list[NativeOps], kind: str, act: str
) -> None:
    """More rows than one slice; alone, in other company and order. All equal what the primitives make."""
    x = normal(2100, 96)
    expected = Composites.mlp_block(crowd[0], x.copy(), mixture(crowd[0], kind, act))
    assert not np.array_equal(expected, x)
    order = np.random.default_rng(0).permutation(2100)
    for ops in crowd:
        made = mixture(ops, kind, act)
        for rows in (
            slice(None),
            order,
            slice(2040, 2060),
            *([row] for row in range(0, 2100, 147)),
        ):
            assert np.array_equal(ops.mlp_block(x[rows].copy(), made), expected[rows])


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_poison_outside_of_the_own_context_does_not_leak(
    crowd: list[NativeOps], dtype: str
) -> None:
    runs = [(0, 20), (33, 3), (270, 1)]
    for ops in crowd:
        for block_size in (1, 5, 16, 64):
            outs = []
            for poison in (True, False):
                blocks = 400
                kv = ops.alloc_kv(kv_spec(block_size, blocks, 2, 32, dtype))
                if poison:
                    poison_blocks(kv, list(range(blocks)))
                whole = batch(history(runs), block_size, blocks)
                fill_kv(ops, kv, whole, 64)
                b: Batch = batch(runs, block_size, blocks)
                outs.append(ops.attention(normal(24, 192), kv, 0, b, SHAPE))
            assert np.isfinite(outs[0]).all()
            assert np.array_equal(outs[0], outs[1])


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_poison_in_the_own_context_is_seen(crowd: list[NativeOps], dtype: str) -> None:
    kv = crowd[1].alloc_kv(kv_spec(16, 8, 2, 32, dtype))
    b = batch([(40, 1)], 16, 8)
    fill_kv(crowd[1], kv, batch([(0, 41)], 16, 8), 64)
    poison_blocks(kv, [int(b.block_table[0, 1])])
    assert np.isnan(crowd[1].attention(normal(1, 192), kv, 0, b, SHAPE)).all()


def test_a_later_tokens_nan_does_not_reach_earlier_rows(crowd: list[NativeOps]) -> None:
    """Rows of one tile see different numbers of tokens; a weight of zero times NaN would be NaN."""
    kv = crowd[0].alloc_kv(kv_spec(16, 8, 2, 32, "float32"))
    b = batch([(0, 30)], 16, 8)
    k, v = normal(30, 64), normal(30, 64, seed=1)
    v[17:] = np.inf
    crowd[0].kv_write(kv, 0, k, v, b.slots)
    with np.errstate(invalid="ignore"):
        out = crowd[0].attention(normal(30, 192), kv, 0, b, SHAPE)
    assert np.isfinite(out[:17]).all()
    assert not np.isfinite(out[17:]).any()


def test_elementwise_operations_treat_rows_alone(crowd: list[NativeOps]) -> None:
    x, y, w = normal(33, 100), normal(33, 100, seed=1), normal(100, seed=2)
    norm, mul = crowd[0].norm(x, w, 1e-5), crowd[0].act_mul(x, y)
    for ops in crowd:
        for rows in (1, 2, 7, 33):
            assert np.array_equal(ops.norm(x[-rows:], w, 1e-5), norm[-rows:])
            assert np.array_equal(ops.act_mul(x[-rows:], y[-rows:]), mul[-rows:])


def test_logits_and_choices_do_not_depend_on_the_crowd(crowd: list[NativeOps]) -> None:
    w, x = weight("Q8_0", 1000, 96), normal(64, 96)
    norm = np.ones(96, np.float32)
    n = np.ones(64, np.float32)
    rest = (
        n * 0.8,
        (n * 20).astype(np.int32),
        n * 0.9,
        n * 0.01,
        np.linspace(0, 0.999, 64, dtype=np.float32),
    )
    head = crowd[0].pack_weight(w)
    logits = crowd[0].logits(x, Head(norm, 1e-5, head)).copy()
    chosen, top = crowd[0].sample(logits, *rest), crowd[0].top_logprobs(logits, 5)
    for ops in crowd:
        packed = ops.pack_weight(w)
        for rows in (1, 3, 8, 64):
            some = ops.logits(x[:rows], Head(norm, 1e-5, packed))
            assert np.array_equal(some, logits[:rows])
            assert np.array_equal(ops.sample(some, *(p[:rows] for p in rest)), chosen[:rows])
            for a, b in zip(ops.top_logprobs(some, 5), top, strict=True):
                assert np.array_equal(a, b[:rows])
