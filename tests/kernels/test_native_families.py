"""What other families than Llama need, natively: against the reference, against the default bodies of the
composites, and bit for bit against itself on other threads, blocks and chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from grid import (
    batch,
    close,
    fill_kv,
    history,
    i32,
    kv_spec,
    layer,
    normal,
    rope_tables,
    vector,
    weight,
)

from pageturner.kernels.base import (
    ACTIVATIONS,
    COMPOSED,
    FEATURES,
    KV_TYPES,
    AttentionShape,
    Layer,
    Ops,
)
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps
from support.poison import poison_blocks

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()


# -- elementwise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8, 31, 64, 576])
def test_layer_norm(ops: NativeOps, n: int) -> None:
    x, w, bias = normal(7, n) * 10 + 3, normal(n, seed=1), normal(n, seed=2)
    close(ops.layer_norm(x, w, bias, 1e-5), REFERENCE.layer_norm(x, w, bias, 1e-5), 3e-6)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(ops: NativeOps, act: str) -> None:
    x = np.linspace(-12, 12, 4001, dtype=np.float32).reshape(1, -1)
    x[0, :8] = [-200, -90, -1e-4, 0, 1e-20, 90, 200, -0.0]
    expected = REFERENCE.activate(x, act)
    got = ops.activate(x.copy(), act)
    assert np.abs(got - expected).max() <= 1e-5
    small = np.abs(x) < 12
    assert np.abs(got - expected)[small].max() <= 1.5e-6
    for width in (1, 5, 8, 13):  # the last few of a row
        close(ops.activate(x[:, -width:].copy(), act), expected[:, -width:], 1e-6)


def test_soft_cap_mul_and_scale(ops: NativeOps) -> None:
    x, y = normal(5, 37) * 30, normal(5, 37, seed=1)
    x[0, :4] = [1e-6, -500, 500, 0]
    capped = ops.soft_cap(x.copy(), 30.0)
    np.testing.assert_allclose(capped, REFERENCE.soft_cap(x, 30.0), rtol=1e-6)
    assert np.array_equal(ops.mul(x.copy(), y), x * y)
    assert np.array_equal(ops.scale(x.copy(), 0.1), x * np.float32(0.1))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (60, 4), (5, 5)])
def test_route(ops: NativeOps, experts: int, top_k: int, normalise: bool) -> None:
    logits = normal(40, experts) * 3
    logits[:5] = np.round(logits[:5])  # ties
    ids, weights = ops.route(logits, top_k, normalise)
    expected_ids, expected = REFERENCE.route(logits, top_k, normalise)
    assert np.array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    alone = [ops.route(row[None], top_k, normalise) for row in logits]
    assert np.array_equal(np.concatenate([a[1] for a in alone]), weights)


def test_route_survives_nan(ops: NativeOps) -> None:
    logits = np.full((1, 6), np.nan, np.float32)
    assert ops.route(logits, 3, True)[0].tolist() == [[0, 1, 2]]


def test_add_rows(ops: NativeOps) -> None:
    x, y, rows = normal(6, 33), normal(3, 33, seed=1), i32([4, 0, 5])
    weights = np.array([0.3, 0.5, 2], np.float32)
    assert np.array_equal(
        ops.add_rows(x.copy(), y, rows, weights), REFERENCE.add_rows(x, y, rows, weights)
    )
    with pytest.raises(ValueError, match="row"):
        ops.add_rows(x, y, i32([0, 1, 6]), weights)


# -- attention -----------------------------------------------------------------------------------------------

SHAPE = AttentionShape(6, 2, 32, 32**-0.5)
SLOPES = (0.5, 0.25, 0.0, 1.0, 0.01, 0.03)
OPTIONS: dict[str, dict[str, Any]] = {
    "window1": {"window": 1},
    "window7": {"window": 7},
    "window300": {"window": 300},
    "cap": {"soft_cap": 2.0},
    "slopes": {"slopes": SLOPES},
    "all": {"window": 40, "soft_cap": 1.5, "slopes": SLOPES},
}


def attend(
    ops: Ops,
    runs: list[tuple[int, int]],
    block_size: int,
    dtype: str,
    shape: AttentionShape,
    trimmed: bool = False,
) -> np.ndarray:
    """With `trimmed`, blocks that the window has left behind lie poisoned, and tables name another block."""
    blocks = sum(-(-(c + n) // block_size) for c, n in runs) + 2
    kv = ops.alloc_kv(kv_spec(block_size, blocks, shape.kv_heads, shape.head_dim, dtype))
    poison_blocks(kv, list(range(blocks)))
    fill_kv(ops, kv, batch(history(runs), block_size, blocks - 1), shape.kv_heads * shape.head_dim)
    b = batch(runs, block_size, blocks - 1)
    if trimmed:
        for s, (computed, _) in enumerate(runs):
            gone = max(0, computed + 1 - shape.window) // block_size
            poison_blocks(kv, b.block_table[s, :gone].tolist())
            b.block_table[s, :gone] = blocks - 1
    q = [
        normal(700, shape.heads * shape.head_dim, seed=50 + s)[c : c + n]
        for s, (c, n) in enumerate(runs)
    ]
    return np.asarray(ops.attention(3 * np.concatenate(q), kv, 0, b, shape))


RUNS = [(0, 1), (3, 1), (0, 19), (250, 9), (511, 1), (530, 30), (17, 1), (600, 1)]


@cache
def meant(name: str, dtype: str) -> np.ndarray:
    """What the definition makes of RUNS, which knows no blocks."""
    return attend(REFERENCE, RUNS, 16, dtype, replace(SHAPE, **OPTIONS[name]))


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_options(ops: NativeOps, name: str, block_size: int) -> None:
    shape = replace(SHAPE, **OPTIONS[name])
    for dtype in KV_TYPES:
        got = attend(ops, RUNS, block_size, dtype, shape)
        close(got, meant(name, dtype), 1e-5)
        if shape.window:
            assert np.array_equal(attend(ops, RUNS, block_size, dtype, shape, trimmed=True), got)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in ("window7", "window300"))],
)
def test_attention_options_do_not_depend_on_blocks_threads_or_chunks(
    ops: NativeOps, name: str
) -> None:
    shape, length = replace(SHAPE, **OPTIONS[name]), 570
    expected = attend(ops, [(0, length)], 16, "float16", shape)
    for threads in (1, 2, 3):
        other = NativeOps(threads, ops.isa)
        for block_size, chunk in ((16, 570), (16, 37), (5, 256), (256, 255), (64, 8)):
            for start in range(0, length, chunk):
                n = min(chunk, length - start)
                out = attend(other, [(start, n)], block_size, "float16", shape)
                assert np.array_equal(out, expected[start : start + n])
        for position in (0, 6, 7, 255, 256, 299, 300, 301, 512, 555, 569):
            assert np.array_equal(
                attend(other, [(position, 1)], 16, "float16", shape)[0], expected[position]
            )


# -- layers --------------------------------------------------------------------------------------------------


def family(ops: Ops, name: str, kind: str) -> Layer:
    """A layer of hidden size 96 and 160 inner columns with what the family adds."""
    shapes = {
        "gemma": replace(SHAPE, window=40, soft_cap=50.0),
        "bloom": replace(SHAPE, slopes=SLOPES),
    }
    made = layer(ops, {"": kind}, 96, 160, shapes.get(name, SHAPE))
    small = {n: ops.pack_weight(vector(n, seed=n)) for n in (96, 160)}
    if name == "gemma":
        made.attn_post_norm = made.mlp_post_norm = small[96]
        made.act = "gelu_tanh"
    if name in ("gpt2", "bloom"):
        made.attn_norm_bias = made.mlp_norm_bias = made.o_bias = made.down_bias = small[96]
        made.up_bias, made.gate, made.act = (
            small[160],
            None,
            "gelu" if name == "gpt2" else "gelu_tanh",
        )
        made.rope = rope_tables(600, 0, interleaved=False)
    if name == "opt":
        made.gate, made.act = None, "relu"
    if name == "mixtral":
        packed = [
            tuple(ops.pack_weight(weight(kind, *size, seed=100 * i + e)) for e in range(4))
            for i, size in enumerate([(160, 96), (160, 96), (96, 160)])
        ]
        made.experts = Experts(
            ops.pack_weight(weight("F32", 4, 96, seed=9)), *packed, 2, normalise=True
        )
        made.gate = made.up = made.down = None
    ops.prepare_layer(made)
    return made


def step(
    ops: Ops, made: Layer, bodies: Any, runs: list[tuple[int, int]], rows: slice = slice(None)
) -> np.ndarray:
    kv = ops.alloc_kv(kv_spec(16, 80, 2, 32, "float32"))
    fill_kv(ops, kv, batch(history(runs), 16, 80), 64)
    b = batch(runs, 16, 80)
    x = normal(len(b.positions), 96)
    h = bodies.attention_block.__get__(ops)(x.copy(), made, kv, 0, b)
    return np.asarray(bodies.mlp_block.__get__(ops)(h, made))[rows]


STEPS = [(0, 5), (20, 1), (250, 12), (300, 1)]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["gemma", "gpt2", "bloom", "opt", "mixtral"])
def test_layers_of_other_families(ops: NativeOps, name: str, kind: str) -> None:
    """The fused composites equal their default bodies bit for bit, and the reference closely."""
    made = family(ops, name, kind)
    assert made.needs or name == "opt"
    fused = step(ops, made, NativeOps, STEPS)
    assert np.array_equal(fused, step(ops, made, Composites, STEPS))
    expected = step(REFERENCE, family(REFERENCE, name, kind), Composites, STEPS)
    close(fused, expected, 1e-4 if kind == "F32" else 3e-2)


@pytest.mark.parametrize("name", ["gemma", "gpt2", "mixtral"])
def test_rows_of_such_layers_do_not_depend_on_the_crowd(ops: NativeOps, name: str) -> None:
    made = family(ops, name, "Q8_0")
    together = step(ops, made, NativeOps, STEPS)
    for threads in (1, 3):
        other = NativeOps(threads, ops.isa)
        first = step(other, family(other, name, "Q8_0"), NativeOps, STEPS[:1])
        assert np.array_equal(first, together[:5])


def test_all_features_are_there(ops: NativeOps) -> None:
    assert ops.features == FEATURES | COMPOSED


@pytest.mark.parametrize("missing", ["q", "down", "attn_norm"])
def test_a_layer_without_a_needed_part_is_refused(ops: NativeOps, missing: str) -> None:
    made = layer(ops, {"": "F32"}, 64, 96, SHAPE)
    setattr(made, missing, None)
    with pytest.raises(ValueError, match="missing"):
        ops.prepare_layer(made)


@pytest.mark.parametrize("change", ["router", "gate", "down", "top_k"])
def test_experts_that_do_not_fit_are_refused(ops: NativeOps, change: str) -> None:
    made = family(ops, "mixtral", "F32")
    other = ops.pack_weight(weight("F32", 5, 64))
    assert made.experts is not None
    wrong = {"router": other, "gate": (other,) * 4, "down": made.experts.down[:3], "top_k": 5}
    made.experts = replace(made.experts, **{change: wrong[change]})
    with pytest.raises(ValueError, match="expert"):
        ops.prepare_layer(made)


def test_an_unknown_activation_is_refused(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="activation"):
        ops._engine.activate(normal(1, 8), 4, normal(1, 8))
