"""Each kernel of the catalogue is executed at least once, on little data, and gives what numpy gives.

A family is the kernels whose names begin alike; a kernel of a new name fails until a family executes it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.formats import ggml
from pageturner.kernels.adapters import KINDS as FACTORS
from pageturner.kernels.adapters import AdapterWeights, LowRank
from pageturner.kernels.base import KV_TYPES, AttentionShape, KVSpec, Stack, Tensor
from pageturner.kernels.edits import Edit, Operation
from pageturner.kernels.gpu.catalogue import (
    ACTIVATIONS,
    ARCHITECTURES,
    GATED,
    GATED_GROUPS,
    LATENT_KINDS,
    M8,
    M16,
    MANY,
    PERSISTENT,
    kernels_of,
    tiles_of,
)
from pageturner.kernels.gpu.experts import Grouping, WeightTable, table_of
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import view_of
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps
from support.adapters import as_kind

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from pageturner.kernels.gpu import experts as experts_module  # noqa: E402
from pageturner.kernels.gpu import launches, sampling  # noqa: E402

REFERENCE = ReferenceOps()
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}


def near(got: np.ndarray, expected: np.ndarray, bound: float = 1e-2) -> None:
    """By the size of the largest."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= bound * max(np.abs(expected).max(), 1e-6)


def narrow(ops: GpuOps, array: launches.GpuArray) -> np.ndarray:
    """What lies in an array of any kind of float."""
    if array.kind == "fp32":
        return ops.to_numpy(array)
    bits = np.empty(array.shape, np.uint16)
    ops.driver.download(bits, array.address)
    if array.kind == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Kinds of files, and their kernels; of Q4_W a row has one scale here, so that four groups become one
WEIGHTS = {
    "BF16": "dense.bf16",
    "F16": "dense.fp16",
    "F32": "dense.fp32",
    "F8_W": "groups.fp8",
    "Q2_K": "groups.8.16",
    "Q3_K": "groups.8.16",
    "Q6_K": "groups.8.16",
    "Q8_0": "groups.8.32",
    "Q4_1": "groups.4.32.fp16",
    "Q4_K": "groups.4.32",
    "Q4_W": "groups.4.128",
    "Q5_0": "groups.5.32",
}


def matrix(kind: str, rows: int = 16, columns: int = 256, seed: int = 3) -> Tensor:
    if kind == "Q2_K":  # groups of 16 with lows; its two fp16 scales are the last bytes of a block
        data = grid.rng(seed).integers(0, 256, (rows, columns // 256, 84), dtype=np.uint8)
        data[..., 80:] = np.array([0.002, 0.003], np.float16).view(np.uint8)
        return Tensor("w", kind, (rows, columns), data.reshape(-1))
    tensor = grid.weight(kind, rows, columns, seed)
    if kind in ("F8_W", "Q4_W"):
        blocks = tensor.data.reshape(rows, -1, ggml.BY_NAME[kind].nbytes)
        floats = 4 if kind == "F8_W" else 8
        blocks[:, :, :floats] = blocks[:, :1, :floats]
    return tensor


def products(ops: GpuOps, patch: pytest.MonkeyPatch) -> None:
    """All heights alike; sums of groups where there are lows; gate and up together; rows of tables."""
    x = grid.normal(3, 256, seed=1)
    for kind, name in WEIGHTS.items():
        tensor = matrix(kind)
        values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
        packed, found = ops.pack_weight(tensor), []
        dense = name.startswith("dense")
        heights = tiles_of(90, name.partition(".")[2]) if dense else (M8, M16, MANY)
        for height in heights:
            patch.setattr(launches, "height_of", lambda *_, height=height: height)
            patch.setattr(launches, "group_height_of", lambda *_, height=height: height)
            patch.setattr(launches, "SOME_ROWS", 0 if height == MANY else 256)
            found.append(ops.to_numpy(ops.linear(ops.on_device(x), packed)))
            assert f"{name}.{height}" in ops.driver.launched
            if name.partition(".")[2] in (*GATED, *GATED_GROUPS):
                both, to = ops.pack_weight(matrix(kind, 64)), packed.compute
                apart = ops.launches.gated(ops.launches.gemm(ops.on_device(x), both), to)
                joined = ops.launches.gated_gemm(ops.on_device(x), both, to)
                assert (narrow(ops, joined) == narrow(ops, apart)).all()
        assert all((one == found[0]).all() for one in found)
        near(found[0], x @ values.T, 2e-2)
        near(ops.to_numpy(ops.embed(packed, grid.i32([8, 2]))), values[[8, 2]], 1e-5)
    wide, x = ops.pack_weight(matrix("Q4_1", 9, 2304)), grid.normal(3, 2304, seed=1)  # of two parts
    for height in (M8, M16, MANY):
        patch.setattr(launches, "group_height_of", lambda *_, height=height: height)
        found.append(ops.to_numpy(ops.linear(ops.on_device(x), wide)))
    assert all((one == found[-1]).all() for one in found[-3:])


def persistent(ops: GpuOps, patch: pytest.MonkeyPatch) -> None:
    """Every ring, of rows enough for it; gate and up together too. Bits are those of `dense`."""
    x = grid.normal(66, 96, seed=1)
    for kind in ("BF16", "F16"):
        packed, both = (ops.pack_weight(grid.weight(kind, rows, 96, seed=3)) for rows in (48, 96))
        found = []
        for ring in (None, *PERSISTENT):
            patch.setattr(launches, "persistent_ring", lambda *_, ring=ring: ring)
            joined = ops.launches.gated_gemm(ops.on_device(x), both, both.compute)
            found.append((ops.to_numpy(ops.linear(ops.on_device(x), packed)), narrow(ops, joined)))
        assert all((one == found[0][0]).all() and (two == found[0][1]).all() for one, two in found)


def rows(ops: GpuOps) -> None:
    run, x, y = ops.launches, grid.normal(2, 64), grid.normal(2, 64, seed=1)
    a, b = ops.on_device(x), ops.on_device(y)
    weight, bias = grid.vector(64, seed=2), grid.vector(64, seed=3)
    mine = [ops.pack_weight(one) for one in (weight, bias)]
    theirs = [REFERENCE.pack_weight(one) for one in (weight, bias)]
    for kind, bound in BOUNDS.items():
        near(
            narrow(ops, run.rms_norm(a, mine[0], 1e-5, kind)),
            REFERENCE.norm(x, theirs[0], 1e-5),
            bound,
        )
        long, by = grid.normal(2, 5008), grid.vector(5008, seed=4)
        got = narrow(ops, run.rms_norm(ops.on_device(long), ops.pack_weight(by), 1e-5, kind))
        near(got, REFERENCE.norm(long, REFERENCE.pack_weight(by), 1e-5), bound)
        expected = REFERENCE.layer_norm(x, *theirs, 1e-5)
        near(narrow(ops, run.layer_norm(a, *mine, 1e-5, kind)), expected, bound)
        for act in (*ACTIVATIONS, "clamped_swiglu"):
            near(narrow(ops, run.gated(a, kind, act)), gated(x[:, :32], x[:, 32:], act), bound)
        near(narrow(ops, run.elementwise("cast", a, kind=kind)), x, bound)
        near(
            narrow(ops, run.elementwise("act_mul", a, b, kind=kind)), REFERENCE.act_mul(x, y), bound
        )
    for op in ("add", "mul", "clamped_swiglu"):
        near(ops.to_numpy(getattr(ops, op)(a, b)), getattr(REFERENCE, op)(x, y), 1e-5)
    for op in ("silu", "gelu", "gelu_tanh", "relu"):
        near(ops.to_numpy(ops.activate(a, op)), REFERENCE.activate(x, op), 1e-5)
    near(ops.to_numpy(ops.scale(a, 0.5)), x / 2, 1e-5)
    near(ops.soft_cap(x, 5.0), REFERENCE.soft_cap(x, 5.0), 1e-5)
    assert (ops.to_numpy(ops.take_rows(a, grid.i32([1]))) == x[[1]]).all()
    order = np.random.default_rng(5).permutation(64).astype(np.int32)
    there = matrix("Q4_0", 16, 64)
    ordered = Tensor("w", there.kind, there.shape, there.data, order=order)
    gathered = ops.on_device(np.ascontiguousarray(x[:, order]))
    expected = ops.to_numpy(ops.linear(gathered, ops.pack_weight(there)))
    assert (ops.to_numpy(ops.linear(a, ops.pack_weight(ordered))) == expected).all()
    rope, positions = grid.rope_tables(9, 8, False), grid.i32([3, 8])
    assert (
        ops.to_numpy(ops.rope(a, positions, rope, 32)) == REFERENCE.rope(x, positions, rope, 32)
    ).all()


def attention(ops: GpuOps) -> None:
    """Of each KV type and size of heads a sequence of few rows in two segments, and one of many rows."""
    for dtype in KV_TYPES:
        for dim in (16, 90, 144):
            if (dtype, dim) == ("float32", 144):
                continue  # refused: nobody keeps such a KV
            shape = AttentionShape(1, 1, dim, 0.2)
            spec = grid.scaled(grid.kv_spec(16, 8, 1, dim, dtype))
            kv, theirs = ops.alloc_kv(spec), REFERENCE.alloc_kv(spec)
            batch = grid.batch([(5, 1), (0, 20)], 16, 8)
            whole = grid.batch(grid.history([(5, 1), (0, 20)]), 16, 8)
            k, v = grid.kv_rows(whole, dim, 0)
            REFERENCE.kv_write(theirs, 0, k, v, whole.slots)
            ops.kv_write(kv, 0, ops.on_device(k), ops.on_device(v), whole.slots)
            q = grid.normal(21, dim, seed=9)
            expected = REFERENCE.attention(q, theirs, 0, batch, shape)
            for kind in ("fp32", "bf16"):
                step = ops.step(batch, {view_of(shape)}, kv)
                got = narrow(
                    ops, ops.launches.attention(ops.on_device(q), kv, 0, step, shape, kind)
                )
                near(got, expected, 2e-2)
            ops.free_kv(kv)
    for dtype in LATENT_KINDS:
        latent_attention(ops, dtype)


def latent_attention(ops: GpuOps, dtype: str) -> None:
    shape, spec = AttentionShape(2, 1, 40, 0.2, latent=32), KVSpec(1, 8, 16, 1, 40, dtype, True)
    kv, theirs = ops.alloc_kv(spec), REFERENCE.alloc_kv(grid.scaled(spec))
    runs = [(5, 1), (0, 20)]
    batch, whole = grid.batch(runs, 16, 8), grid.batch(grid.history(runs), 16, 8)
    k, q = grid.normal(len(whole.slots), 40), grid.normal(21, 80, seed=9)
    REFERENCE.kv_write(theirs, 0, k, None, whole.slots)
    ops.kv_write(kv, 0, ops.on_device(k), None, whole.slots)
    expected = REFERENCE.attention(q, theirs, 0, batch, shape)
    for kind in ("fp32", "bf16"):
        step = ops.step(batch, {view_of(shape)}, kv)
        got = narrow(ops, ops.launches.attention(ops.on_device(q), kv, 0, step, shape, kind))
        near(got, expected, 2e-2)
    ops.free_kv(kv)


def latents(ops: GpuOps) -> None:
    """Queries, latents and rotary keys of rows, placed in one launch and by one operation after the other."""
    heads, plain, rank, rotary = 3, 16, 32, 8
    widths = (heads * plain, heads * rotary, rank, rotary)
    rope, norm = grid.rope_tables(9, rotary // 2, True), ops.pack_weight(grid.vector(rank, seed=4))
    for dtype in LATENT_KINDS:
        spec = KVSpec(1, 8, 4, 1, rank + rotary, dtype, True)
        here, apart = ops.alloc_kv(spec), ops.alloc_kv(spec)
        step = ops.step(grid.batch([(3, 2), (0, 1)], 4, 8), (), here)
        values = np.split(grid.normal(3, sum(widths), seed=3), np.cumsum(widths)[:-1], axis=1)
        wide = ops.on_device(np.hstack(values))
        q_rope, k, k_rope = map(ops.on_device, map(np.ascontiguousarray, values[1:]))
        q_rope, k_rope = (
            ops.launches.rotate(one, step.positions, rope, rotary) for one in (q_rope, k_rope)
        )
        joined = ops.join_heads(ops.launches.rms_norm(k, norm, 1e-5), k_rope, 1)
        ops.kv_write(apart, 0, joined, None, step.slots)
        for kind, bound in BOUNDS.items():
            rows = launches.Latents(heads, plain, rank, rotary, kind, rope, norm)
            got, both = ops.launches.latent_kv_write(
                wide, rows, 1e-5, here, 0, step.slots, step.positions
            )
            near(narrow(ops, got), values[0], bound)
            turned = (
                ops.to_numpy(both).reshape(3, heads, -1)[:, :, rank : rank + rotary].reshape(3, -1)
            )
            near(turned, ops.to_numpy(q_rope), 1e-6)
        near(stored(ops, here.keys, spec), stored(ops, apart.keys, spec), 1e-6)


def placing(ops: GpuOps) -> None:
    """Heads of a row of Q, K and V normed, rotated and written, as each step by itself does it."""
    for dtype in KV_TYPES:
        for dim in (16, 90, 144):
            if (dtype, dim) == ("float32", 144):
                continue
            spec = grid.scaled(grid.kv_spec(4, 8, 2, dim, dtype))
            here, apart = ops.alloc_kv(spec), ops.alloc_kv(spec)
            step = ops.step(grid.batch([(3, 2), (0, 1)], 4, 8), (), here)
            wide = ops.on_device(grid.normal(3, 8 * dim, seed=3))
            norms = [ops.pack_weight(grid.vector(dim, seed=seed)) for seed in (4, 5)]
            rope = grid.rope_tables(9, dim // 4, False)
            q, k, v = (wide.columns(a * dim, b * dim) for a, b in ((0, 4), (4, 6), (6, 8)))
            for mine in (None, norms):
                if mine:
                    q, k = (
                        ops.launches.rms_norm(one, by, 1e-5, dim=dim)
                        for one, by in zip((q, k), norms, strict=True)
                    )
                expected = ops.to_numpy(ops.launches.rotate(q, step.positions, rope, dim))
                ops.launches.kv_write(apart, 0, k, v, step.slots, step.positions, rope)
                got = ops.launches.qk_norm_rope_kv_write(wide, mine, 1e-5, here, 0, step, rope, 4)
                near(ops.to_numpy(ops.launches.fit_heads(got, 4, dim)), expected, 1e-6)
                for one, other in zip(here.at(0), apart.at(0), strict=True):
                    if one:
                        near(stored(ops, one, spec), stored(ops, other, spec), 1e-6)


def stored(ops: GpuOps, address: int, spec: KVSpec) -> Any:
    """Bytes of the slots that were written, as numbers."""
    count = spec.blocks * spec.block_size * spec.kv_heads
    found = np.zeros(count * 4, np.uint8)
    ops.driver.download(found, address)
    return found.astype(np.float64)


def choosing(ops: GpuOps) -> None:
    logits, zeros = grid.normal(2, 70), np.zeros(2, np.float32)
    array = ops.on_device(logits)
    edits = [
        [Edit(Operation.ADD, [4], [100.0])],
        [Edit(Operation.FORBID, [int(logits[1].argmax())])],
    ]
    sampling.edit_on_device(ops, array, None, edits)
    draw = (zeros, zeros.astype(np.int32), zeros + 1, zeros, zeros)
    ids = sampling.sample_on_device(ops, array, draw)[0]
    assert ids.tolist() == [4, int(np.argsort(logits[1])[-2])]
    first = (zeros + 1, grid.i32([1, 1]), *draw[2:])
    assert sampling.sample_on_device(ops, array, first)[0].tolist() == ids.tolist()


def experts(ops: GpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows and of many; what the products are of comes out of each."""
    for kind, name in WEIGHTS.items():
        sort = name.partition(".")[2]
        weights = [matrix(kind, 32, seed=e) for e in range(3)]
        table = table_of(ops.driver, ([ops.pack_weight(one) for one in weights],))
        assert [one[0] for one in table.sorts] == [sort]
        x, ids = grid.normal(4, 256), grid.i32([2, 0, 2, 2])
        order, bounds = ops.on_device(grid.i32([1, 0, 2, 3])), ops.on_device(grid.i32([0, 1, 1, 4]))
        expected = np.stack([row @ values_of(weights[e]).T for row, e in zip(x, ids, strict=True)])
        for most in (0, 64):
            monkeypatch.setattr(experts_module, "MANY_ROWS", most)
            grouping = Grouping(4, order=order.address, bounds=bounds.address)
            near(
                ops.to_numpy(ops._experts.gemm(ops.on_device(x), table, grouping)),
                expected,
                2e-2,
            )
    for outputs in (4, 600):
        for scoring in ("softmax", "sigmoid"):
            logits = grid.normal(2, outputs)
            assert (
                ops.route(logits, 3, True, scoring)[0]
                == REFERENCE.route(logits, 3, True, scoring)[0]
            ).all()
    weights = ops.on_device(np.array([[2, 3]], np.float32))
    for kind in BOUNDS:
        table = WeightTable((), (kind,), 2, 1, 32, 32)
        got = narrow(ops, ops._experts._weighed(ops.on_device(x[:1, :32]), weights, table))
        near(got, x[:1, :32] * np.float32([[2], [3]]), BOUNDS[kind])
    router, parts = (
        grid.weight("F32", 2, 32, seed=5),
        [grid.weight("F32", 32, 32, seed=e) for e in range(6)],
    )
    mine = [[ops.pack_weight(one) for one in parts[at : at + 2]] for at in (0, 2, 4)]
    mixture = Experts(ops.pack_weight(router), *mine, top_k=2, normalise=True)  # type: ignore[arg-type]
    layer = SimpleNamespace(
        experts=mixture, act="silu", native={"experts": ops._experts.tables(ops.driver, mixture)}
    )
    assert ops.add_experts(ops.on_device(x[:, :32]), ops.on_device(x[:, :32]), layer).shape == (
        4,
        32,
    )
    ones = np.ones(1, np.float32)
    got = ops.to_numpy(ops.add_rows(ops.on_device(x), ops.on_device(x[:1]), grid.i32([2]), ones))
    near(got[2], x[2] + x[0], 1e-6)


def gated(gate: np.ndarray, up: np.ndarray, act: str) -> np.ndarray:
    if act in ("silu", "clamped_swiglu"):
        return getattr(REFERENCE, "act_mul" if act == "silu" else act)(gate, up)
    return REFERENCE.activate(gate, act) * up


def values_of(tensor: Tensor) -> np.ndarray:
    return ggml.dequantise(tensor.kind, tensor.shape, tensor.data)


def adapters(ops: GpuOps) -> None:
    """Rows and factors of every pair of kinds, a head and an embedding among them."""
    table, layer = ops.pack_weight(grid.weight("F32", 7, 32)), SimpleNamespace(q=None)
    layer.q = ops.pack_weight(grid.weight("F32", 9, 32))
    stack, x, tokens = Stack(table, [layer], 1e-5), grid.normal(3, 32), grid.i32([6, 0, 6])
    for kind in FACTORS:
        pair, low = (
            LowRank(
                *(as_kind(grid.normal(*one, seed=seed), kind) for seed, one in enumerate(shapes)),
                0.5,
            )
            for shapes in (((5, 32), (9, 5)), ((7, 5), (32, 5)))
        )
        weights = AdapterWeights(kind, ({"q": pair},), embed=low)
        mine, theirs = ops.pack_adapter(weights, stack), REFERENCE.pack_adapter(weights, stack)
        embedded = ops.to_numpy(ops.adapt_embedded(ops.on_device(x), tokens, [mine] * 3))
        near(embedded, REFERENCE.adapt_embedded(x, tokens, [theirs] * 3), 1e-5)
        expected = REFERENCE.adapt(np.ones((3, 9), np.float32), x, [theirs] * 3, 0, "q")
        for x_kind in BOUNDS:
            rows = ops.launches.cast(ops.on_device(x), x_kind)
            rows = launches.GpuArray(rows.address, rows.shape, x_kind)
            y = ops.on_device(np.ones((3, 9), np.float32))
            near(ops.to_numpy(ops.adapt(y, rows, [mine] * 3, 0, "q")), expected)


FAMILIES: dict[Callable[..., None], str] = {
    products: "dense gated_dense groups gated_groups group_sums in_order embed embed_groups",
    persistent: "persistent gated_persistent",
    rows: "rms_norm head_norm layer_norm gated elementwise rotate take_rows take_columns",
    attention: "attend kv_write fit_heads",
    latents: "latent_kv_write join_heads",
    placing: "qk_norm_rope_kv_write",
    choosing: "edit forbid sample",
    experts: "route group_rows experts add_rows add_experts weigh_rows",
    adapters: "lora_shrink lora_expand lora_pick",
}
OF_RANKS = {
    "all_reduce",
    "all_reduce_twice",
    "gather",
}  # tests/gpu/test_ranks.py executes them on two ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.__name__)
def test_every_kernel_is_executed(
    family: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = GpuOps(fake_gpu.FakeDriver(), 64 << 20, graphs=False)
    family(ops, monkeypatch) if family in (products, persistent, experts) else family(ops)
    begins = FAMILIES[family].split()
    every = {name for name in kernels_of(90) if name.partition(".")[0] in begins}
    assert every - set(ops.driver.launched) == set()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_of_a_family(architecture: int) -> None:
    known = {*" ".join(FAMILIES.values()).split(), *OF_RANKS}
    assert {
        name for name in kernels_of(architecture) if name.partition(".")[0] not in known
    } == set()
