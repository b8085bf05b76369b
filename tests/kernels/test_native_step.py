"""The layers of a whole step in one native call, against the same made of composites: every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import batch, history, i32, layer, normal, rope_tables, vector, weight

from pageturner.kernels.base import KV, AttentionShape, Batch, KVSpec, Layer, Stack
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
SHAPE = AttentionShape(6, 2, 32, 32**-0.5)
RUNS = [(0, 5), (20, 1), (250, 12), (300, 1), (0, 40)]  # 59 rows
LAST = (4, 5, 17, 18, 58)
WANTED = {
    "none": (),
    "all": tuple(range(59)),
    "the last of each": LAST,
    "prompts too": (*LAST, *range(3), *range(6, 15), *range(19, 58)),
    "one": (12,),
}


@pytest.fixture(scope="module")
def crowd() -> list[NativeOps]:
    return [NativeOps(threads) for threads in (1, 3)]


def plain(ops: NativeOps) -> Stack:
    kinds = {"": "Q4_1", "o": "F32", "v": "Q8_0"}
    layers = [layer(ops, kinds, 96, 160, SHAPE, qwen=i == 1) for i in range(3)]
    return Stack(ops.pack_weight(weight("Q8_0", 300, 96)), layers, 1e-5)


def windows(ops: NativeOps) -> Stack:
    """Every layer but the second sees 40 tokens; what attention adds is normed."""
    layers = []
    for i in range(3):
        made = layer(ops, {"": "Q8_0"}, 96, 160, SHAPE if i == 1 else replace(SHAPE, window=40))
        made.attn_post_norm = made.mlp_post_norm = ops.pack_weight(vector(96, seed=i))
        made.act = "gelu_tanh"
        ops.prepare_layer(made)
        layers.append(made)
    return Stack(ops.pack_weight(weight("F32", 300, 96)), layers, 1e-5, embed_scale=9.7)


def positions(ops: NativeOps) -> Stack:
    """Learnt positions and a norm behind the embedding, no rotary tables."""
    layers: list[Layer] = []
    for _ in range(2):
        made = layer(ops, {"": "F32"}, 96, 160, SHAPE)
        made.gate, made.act, made.rope = None, "gelu", rope_tables(600, 0, interleaved=False)
        ops.prepare_layer(made)
        layers.append(made)
    norms = [ops.pack_weight(vector(96, seed=n)) for n in (5, 6)]
    return Stack(
        ops.pack_weight(weight("F32", 300, 96)),
        layers,
        1e-5,
        1.0,
        ops.pack_weight(weight("F32", 400, 96, seed=4)),
        *norms,
    )


STACKS = {"plain": plain, "windows": windows, "positions": positions}


def filled(ops: NativeOps, layers: int) -> KV:
    """The same history in every layer, so that sequences which go on find something."""
    kv = ops.alloc_kv(KVSpec(layers, 80, 16, 2, 32, "float16"))
    whole = batch(history(RUNS), 16, 80)
    for i in range(layers):
        ops.kv_write(
            kv, i, normal(len(whole.slots), 64, seed=i), normal(len(whole.slots), 64), whole.slots
        )
    return kv


def run(
    ops: NativeOps, stack: Stack, body: Any, wanted: tuple[int, ...], apart: bool
) -> list[np.ndarray]:
    """The wanted rows, and then what the step has left in storage: the next step of one sequence."""
    windowed = sum(one.shape.window > 0 for one in stack.layers) if apart else 0
    b = batch(RUNS, 16, 80)
    b.tokens, b.logit_rows = i32(np.arange(59) * 7 % 300), i32(wanted)
    kv = filled(ops, len(stack.layers) - windowed)
    sliding = (replace(b), filled(ops, windowed)) if apart else None
    first = body.hidden.__get__(ops)(stack, b, kv, sliding).copy()
    after = batch([(c + n, 1) for c, n in RUNS], 16, 80)
    after.tokens = i32([1, 2, 3, 4, 5])
    after.block_table = b.block_table  # the blocks of the first step
    after.slots = i32(
        [b.block_table[s, p // 16] * 16 + p % 16 for s, p in enumerate(after.positions)]
    )
    sliding = (replace(after), sliding[1]) if sliding else None
    return [first, body.hidden.__get__(ops)(stack, after, kv, sliding)]


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("name", STACKS)
def test_a_step_equals_its_composites(
    crowd: list[NativeOps], name: str, wanted: tuple[int, ...]
) -> None:
    for apart in (False, True) if name == "windows" else (False,):
        expected = None
        for ops in crowd:
            stack = STACKS[name](ops)
            ops.prepare_stack(stack)
            for body in (Composites, NativeOps):
                found = run(ops, stack, body, wanted, apart)
                expected = expected or found
                assert len(found[0]) == len(wanted)
                for a, b in zip(found, expected, strict=True):
                    assert np.isfinite(a).all()
                    assert np.array_equal(a, b)


@pytest.mark.parametrize("change", ["tokens", "logit_rows", "positions", "slots", "kv"])
def test_a_step_outside_of_the_memory_is_refused(crowd: list[NativeOps], change: str) -> None:
    ops = crowd[0]
    stack = plain(ops)
    ops.prepare_stack(stack)
    b: Batch = batch([(0, 2)], 16, 8)
    b.tokens, b.logit_rows = i32([1, 2]), i32([1])
    kv = ops.alloc_kv(KVSpec(2 if change == "kv" else 3, 8, 16, 2, 32, "float16"))
    wrong = {
        "tokens": i32([1, 300]),
        "logit_rows": i32([2]),
        "positions": i32([0, 600]),
        "slots": i32([0, 128]),
    }
    if change != "kv":
        setattr(b, change, wrong[change])
    with pytest.raises(
        ValueError, match="token" if change == "tokens" else change.split("_")[0] + "|KV"
    ):
        ops.hidden(stack, b, kv, None)
