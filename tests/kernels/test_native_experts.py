"""Experts that were chosen outside of C++, as one native call: bit for bit what one product after the other makes
of them, and close to the reference, in crowds of any size and on any number of threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import close, layer, normal, vector, weight

from pageturner.kernels.base import GATED, SQUARED, AttentionShape, Layer, Ops
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()
EXPERTS, TOP_K, WIDTH, INNER = 8, 3, 96, 64
ROWS = 2100  # more than a slice, and more pairs than are computed at once
ACTS = {"gated": "silu", "tanh": "gelu_tanh", "ungated": SQUARED, "relu": "relu", "biases": GATED}


def mixture(ops: Ops, kind: str, name: str, bits: int = 8) -> Layer:
    def packed(rows: int, columns: int, seed: int) -> tuple[Any, ...]:
        found = (weight(kind, rows, columns, seed + e) for e in range(EXPERTS))
        return tuple(ops.pack_weight(replace(one, bits=bits)) for one in found)

    def vectors(n: int) -> tuple[Any, ...]:
        return tuple(ops.pack_weight(vector(n, seed=n + e)) for e in range(EXPERTS))

    made = layer(ops, {"": "F32"}, WIDTH, INNER, AttentionShape(6, 2, 32, 32**-0.5))
    made.act = ACTS.get(name, "silu")
    made.gate = made.up = made.down = None
    gates, ups, downs = packed(INNER, WIDTH, 1), packed(INNER, WIDTH, 20), packed(WIDTH, INNER, 40)
    if name in ("ungated", "relu"):
        gates = ()
    router = ops.pack_weight(weight("F32", EXPERTS, WIDTH, seed=9))
    made.experts = Experts(router, gates, ups, downs, TOP_K, normalise=True)
    if name == "biases":
        inner, outer = vectors(INNER), vectors(WIDTH)
        made.experts = replace(made.experts, gate_bias=inner, up_bias=inner, down_bias=outer)
    if name == "weighed before":
        made.experts = replace(made.experts, weigh_input=True)
    ops.prepare_layer(made)
    return made


def choice(rows: int, popular: bool = False) -> tuple[Any, Any]:
    """Ids of distinct experts, ascending, and weights; the popular ones: of half of the rows the same."""
    order = np.argsort(normal(rows, EXPERTS, seed=3), axis=1)[:, :TOP_K]
    if popular:
        order[::2] = [1, 2, 7]
    weights = np.abs(normal(rows, TOP_K, seed=4)) + np.float32(0.1)
    return np.ascontiguousarray(np.sort(order, axis=1), np.int32), weights


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", [*ACTS, "weighed before"])
def test_chosen_experts_equal_one_product_after_the_other(
    ops: NativeOps, name: str, kind: str
) -> None:
    made, x, h = mixture(ops, kind, name), normal(70, WIDTH), normal(70, WIDTH, seed=1)
    for rows in (70, 1, 5, 8, 49):
        chosen = tuple(each[:rows] for each in choice(70))
        once = ops.mix_experts(x[:rows].copy(), h[:rows], made, chosen)
        loop = Composites.mix_experts(ops, x[:rows].copy(), h[:rows], made, chosen)
        assert np.array_equal(once, loop)
    meant = Composites.mix_experts(
        REFERENCE, x[:rows].copy(), h[:rows], mixture(REFERENCE, kind, name), chosen
    )
    close(once, meant, {"F32": 1e-5, "BF16": 1e-5}.get(kind, 5e-2))


@pytest.mark.parametrize(("name", "bits"), [("ungated", 12), ("gated", 15), ("weighed before", 12)])
def test_rows_do_not_depend_on_slices_parts_or_threads(
    ops: NativeOps, name: str, bits: int
) -> None:
    x, h, chosen = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1), choice(ROWS, popular=True)
    made = mixture(ops, "Q4_1", name, bits)
    expected = Composites.mix_experts(ops, x.copy(), h, made, chosen)
    for threads in (1, 2, 3):
        other = NativeOps(threads, ops.isa)
        made = mixture(other, "Q4_1", name, bits)
        for rows in (slice(None), slice(2040, 2060), slice(500, 1012), slice(7, 8)):
            mine = chosen[0][rows], chosen[1][rows]
            assert np.array_equal(
                other.mix_experts(x[rows].copy(), h[rows], made, mine), expected[rows]
            )


def test_the_router_chooses_where_nobody_else_does(ops: NativeOps) -> None:
    made, x, h = mixture(ops, "Q8_0", "gated"), normal(60, WIDTH), normal(60, WIDTH, seed=1)
    assert made.experts is not None
    chosen = ops.route(ops.linear(h, made.experts.router), TOP_K, normalise=True)
    expected = Composites.mix_experts(ops, x.copy(), h, made, chosen)
    assert np.array_equal(ops.add_experts(x.copy(), h, made), expected)


def test_choices_that_do_not_fit_are_refused(ops: NativeOps) -> None:
    made, x, h = mixture(ops, "F32", "gated"), normal(4, WIDTH).copy(), normal(4, WIDTH, seed=1)
    ids, weights = choice(4)
    beyond, twice = ids.copy(), ids.copy()
    beyond[3, 2], twice[1] = EXPERTS, [2, 2, 5]
    for wrong in ((beyond, weights), (twice, weights), (ids[:3], weights), (ids, weights[:, :2])):
        with pytest.raises((ValueError, TypeError)):
            ops.mix_experts(x, h, made, wrong)


def test_experts_may_see_what_they_are_added_to(ops: NativeOps) -> None:
    made, x, chosen = mixture(ops, "F32", "gated"), normal(ROWS, WIDTH), choice(ROWS)
    both = x.copy()
    expected = ops.mix_experts(x.copy(), x, made, chosen)
    assert np.array_equal(ops.mix_experts(both, both, made, chosen), expected)
