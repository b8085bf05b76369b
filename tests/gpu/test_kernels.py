"""Each kernel, interpreted, against the numpy reference, and each row against itself among others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pageturner.formats import float8, ggml
from pageturner.kernels.base import KV_TYPES, AttentionShape, Batch, Tensor
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.reference import ReferenceOps

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

REFERENCE = ReferenceOps()
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def device() -> GpuOps:
    return GpuOps(gpu_device.make_driver(), 64 << 20, graphs=False)


@pytest.fixture
def ops(device: GpuOps) -> GpuOps:
    device.begin()
    return device


def near(got: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """By the size of the largest."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= bound * max(np.abs(expected).max(), 1e-6)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "F32":
        return x
    if kind == "F16":
        return x.astype(np.float16).astype(np.float32)
    return ((x.view(np.uint32) + 0x7FFF + (x.view(np.uint32) >> 16 & 1)) & 0xFFFF0000).view(
        np.float32
    )


_OTHERS = (
    "F32",
    "F16",
    "F8_W",
    "Q8_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "MXFP4",
)
KINDS = ["BF16", "Q4_0", *(pytest.param(k, marks=slow) for k in _OTHERS)]


def columns_of(kind: str) -> int:
    return max(96, 2 * ggml.BY_NAME[kind].values if kind in ggml.BY_NAME else 96)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [80, pytest.param(70, marks=slow)])  # 70 is no multiple of 16
def test_products_equal_the_products_of_the_values(ops: GpuOps, kind: str, outputs: int) -> None:
    tensor = grid.weight(kind, outputs, columns_of(kind), seed=3)
    x = grid.normal(5, tensor.shape[1], seed=1)
    compute = kind if kind in ("F32", "F16") else "BF16"
    values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
    expected = rounded(x, compute).astype(np.float64) @ values.T.astype(np.float64)
    bias = grid.vector(outputs, seed=4)
    packed, own = ops.pack_weight(tensor), ops.pack_weight(bias)
    got = ops.to_numpy(ops.linear(ops.on_device(x), packed))
    # F8_W of many scales is rounded to bf16
    near(got, expected, 2e-6 * 10 if kind != "F8_W" else 1e-2)
    with_bias = ops.to_numpy(ops.linear(ops.on_device(x), packed, own))
    assert (with_bias == got + bias.data.view(np.float32)).all()
    tokens = np.array([0, 69, 7], np.int32)
    assert (ops.to_numpy(ops.embed(packed, tokens)) == values[tokens]).all() or kind == "F8_W"


@pytest.mark.parametrize(
    "kind",
    [
        "BF16",
        *(
            pytest.param(k, marks=slow)
            for k in ("F16", "F32", "Q4_1", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "fp8")
        ),
    ],
)
def test_a_row_of_a_product_has_its_bits_in_every_batch(
    ops: GpuOps, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, with the parts of K beside each other, and many, with the parts one behind the other."""
    from pageturner.kernels.gpu import launches

    codes = grid.rng(5).integers(0, 127, (48, 2304), dtype=np.uint8)
    tensor = (
        grid.fp8(codes, grid.normal(48)) if kind == "fp8" else grid.weight(kind, 48, 2304, seed=5)
    )
    weight = ops.pack_weight(tensor)
    x = grid.normal(130, 2304, seed=6)
    alone = ops.to_numpy(ops.linear(ops.on_device(x[77:78]), weight))
    few = ops.to_numpy(ops.linear(ops.on_device(x[70:88]), weight))
    between = ops.to_numpy(ops.linear(ops.on_device(x[70:82]), weight))
    monkeypatch.setattr(launches, "persistent_ring", lambda *_: None)
    monkeypatch.setattr(launches, "height_of", lambda *_: launches.MANY)
    monkeypatch.setattr(launches, "group_height_of", lambda *_: launches.MANY)
    monkeypatch.setattr(launches, "SOME_ROWS", 0)
    many = ops.to_numpy(ops.linear(ops.on_device(x), weight))
    assert (few[7] == alone[0]).all()
    assert (between[7] == alone[0]).all()
    assert (many[77] == alone[0]).all()


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_every_fp8_code_is_exact(ops: GpuOps, rows: int) -> None:
    """Products with ones at one column each: the values themselves, subnormals too. Codes of NaN are not
    among them, such a matrix is in bf16."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = ops.pack_weight(grid.fp8(np.tile(codes, (16, 1)), np.full(16, 0.5)))
    assert weight.sort == "fp8"
    expected = np.tile(float8.VALUES[codes] / 2, (16, 1))
    for first in range(0, 256, 128):
        x = np.zeros((max(rows, 128), 256), np.float32)
        x[np.arange(128), np.arange(first, first + 128)] = 1
        got = np.concatenate(
            [
                ops.to_numpy(ops.linear(ops.on_device(x[at : at + rows]), weight))
                for at in range(0, 128, rows)
            ]
        )[:128]
        assert (expected[:, first : first + 128] == got.T).all()
    table = ops.to_numpy(ops.embed(weight, np.array([3, 15], np.int32)))
    assert (table == expected[:2]).all()


@slow
@pytest.mark.parametrize("width", [1100, 1200, 5200])  # 1,100 elements are no whole vectors of 16
def test_norms_equal_the_reference(ops: GpuOps, width: int) -> None:
    x, weight, bias = grid.normal(3, width), grid.vector(width, seed=2), grid.vector(width, seed=3)
    mine, theirs = ops.pack_weight(weight), REFERENCE.pack_weight(weight)
    near(
        ops.to_numpy(ops.norm(ops.on_device(x), mine, 1e-5)), REFERENCE.norm(x, theirs, 1e-5), 1e-6
    )
    got = ops.layer_norm(ops.on_device(x), mine, ops.pack_weight(bias), 1e-5)
    near(
        ops.to_numpy(got), REFERENCE.layer_norm(x, theirs, REFERENCE.pack_weight(bias), 1e-5), 1e-6
    )
    head = grid.vector(50, seed=4)
    got = ops.head_norm(ops.on_device(x), ops.pack_weight(head), 1e-5, 50)
    near(ops.to_numpy(got), REFERENCE.head_norm(x, REFERENCE.pack_weight(head), 1e-5, 50), 1e-6)


_OPERATIONS = ("clamped_swiglu", "add", "mul", "silu", "gelu", "gelu_tanh", "relu", "scale", "cap")


@pytest.mark.parametrize("name", ["act_mul", *(pytest.param(op, marks=slow) for op in _OPERATIONS)])
def test_elements_equal_the_reference(ops: GpuOps, name: str) -> None:
    x, y = 3 * grid.normal(3, 700), 3 * grid.normal(3, 700, seed=1)
    x[0, :4] = 0, 100, -100, -88
    calls: dict[str, Callable[..., np.ndarray]] = {
        "scale": lambda o, a, b: o.scale(a, 0.22),
        "cap": lambda o, a, b: o.soft_cap(x, 5.0),
    }
    for act in ("silu", "gelu", "gelu_tanh", "relu"):
        calls[act] = lambda o, a, b, act=act: o.activate(a, act)
    call = calls.get(name, lambda o, a, b: getattr(o, name)(a, b))
    with np.errstate(over="ignore"):
        expected = call(REFERENCE, x, y)
    got = call(ops, ops.on_device(x), ops.on_device(y))
    near(got if isinstance(got, np.ndarray) else ops.to_numpy(got), expected, 2e-6)


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=slow)])
def test_rotary_equals_the_reference_bit_for_bit(ops: GpuOps, interleaved: bool) -> None:
    rope = grid.rope_tables(40, 12, interleaved)
    x, positions = grid.normal(4, 3 * 32), np.array([0, 3, 39, 7], np.int32)
    got = ops.to_numpy(ops.rope(ops.on_device(x), positions, rope, 32))
    assert (got == REFERENCE.rope(x, positions, rope, 32)).all()


@slow
def test_rows_are_taken_scaled_and_added(ops: GpuOps) -> None:
    x, y, rows = grid.normal(5, 1030), grid.normal(2, 1030, seed=1), np.array([4, 1], np.int32)
    factors = grid.normal(6, seed=2)
    assert (ops.to_numpy(ops.take_rows(ops.on_device(x), rows)) == x[rows]).all()
    got = ops.to_numpy(ops.scale_rows(ops.on_device(y), factors, rows))
    assert (got == REFERENCE.scale_rows(y, factors, rows)).all()
    got = ops.to_numpy(ops.add_rows(ops.on_device(x), ops.on_device(y), rows, factors[:2]))
    assert (got == REFERENCE.add_rows(x, y, rows, factors[:2])).all()


# -- attention -----------------------------------------------------------------------------------------------
SHAPES = {
    "plain": AttentionShape(6, 2, 16, 0.25),
    "window": AttentionShape(4, 4, 48, 0.2, window=70),
    "chunks": AttentionShape(4, 2, 16, 0.25, window=64, chunked=True),
    "cap": AttentionShape(4, 2, 80, 0.1, soft_cap=3.0),
    "slopes": AttentionShape(4, 2, 16, 0.25, slopes=(0.5, 0.25, 0.125, 0.06)),
    "sinks": AttentionShape(4, 2, 16, 0.25, window=300, sinks=(0.5, -1.0, 2.0, 0.0)),
    "heads of 100": AttentionShape(4, 2, 100, 0.1),
    "heads of 10": AttentionShape(3, 3, 10, 0.3),
}
RUNS = [(300, 1), (0, 40), (511, 2), (20, 1), (250, 20)]


def filled(
    o: GpuOps, runs: list[tuple[int, int]], shape: AttentionShape, dtype: str
) -> tuple[object, ...]:
    """Of both backends a KV with the same rows. fp16 lies in both alike; kernels write the others."""
    blocks = 2 + sum(-(-(c + n) // 16) for c, n in runs)
    spec = grid.kv_spec(16, blocks, shape.kv_heads, shape.head_dim, dtype)
    kv, theirs = o.alloc_kv(spec), REFERENCE.alloc_kv(grid.scaled(spec))
    batch, whole = grid.batch(runs, 16, blocks), grid.batch(grid.history(runs), 16, blocks)
    k, v = grid.kv_rows(whole, shape.kv_heads * shape.head_dim, 0)
    REFERENCE.kv_write(theirs, 0, k, v, whole.slots)
    if dtype == "float16" and shape.head_dim % 16 == 0:
        o.driver.upload(kv.keys, theirs.k[0])
        o.driver.upload(kv.values, theirs.v[0])
    else:
        o.kv_write(kv, 0, o.on_device(k), o.on_device(v), whole.slots)
    return kv, theirs, batch


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("plain", "float16")]
    + [pytest.param("heads of 10", dtype, marks=slow) for dtype in ("float16", "fp8_e4m3")]
    + [pytest.param("heads of 100", dtype, marks=slow) for dtype in KV_TYPES]
    + [pytest.param("plain", dtype, marks=slow) for dtype in KV_TYPES if dtype != "float16"]
    + [
        pytest.param(name, "float16", marks=slow)
        for name in SHAPES
        if name not in ("plain", "heads of 10")
    ],
)
def test_attention_equals_the_reference(ops: GpuOps, name: str, dtype: str) -> None:
    shape = SHAPES[name]
    kv, theirs, batch = filled(ops, RUNS, shape, dtype)
    q = grid.normal(len(batch.positions), shape.heads * shape.head_dim, seed=9)
    expected = REFERENCE.attention(q, theirs, 0, batch, shape)
    got = ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, batch, shape))
    bound = {"float32": 1e-5, "bfloat16": 2e-2}.get(dtype, 3e-3)
    near(got, expected, bound)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("plain", 90), pytest.param("plain", 80, marks=slow), pytest.param("sinks", 90, marks=slow)],
)
def test_a_row_of_attention_has_its_bits_alone_in_a_chunk_and_in_a_crowd(
    name: str, architecture: int
) -> None:
    ops = GpuOps(gpu_device.make_driver(architecture=architecture), 64 << 20, graphs=False)
    shape = SHAPES[name]
    kv, _, batch = filled(ops, RUNS, shape, "float16")
    q = grid.normal(len(batch.positions), shape.heads * shape.head_dim, seed=9)
    crowd = ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, batch, shape))
    for row in (0, 30, 42, 50):
        one = grid.row_of(batch, row)
        ops.begin()
        alone = ops.to_numpy(ops.attention(ops.on_device(q[row : row + 1]), kv, 0, one, shape))
        assert (alone[0] == crowd[row]).all(), row


@pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(k, marks=slow) for k in KV_TYPES if k != "int8")]
)
def test_kv_is_rounded_as_in_the_reference(ops: GpuOps, dtype: str) -> None:
    shape = AttentionShape(2, 2, 16, 0.25)
    spec = grid.scaled(grid.kv_spec(4, 3, 2, 16, dtype))
    kv, theirs = ops.alloc_kv(spec), REFERENCE.alloc_kv(spec)
    k, v = 2 * grid.normal(5, 32), 300 * grid.normal(5, 32, seed=1)
    k[0, :16], k[1, :8] = 0, [1e-3, 0.0146, 0.0156, 2.5, -17, -464, 1000, 1e-4]
    slots = grid.i32([3, -1, 0, 11, 7])
    ops.kv_write(kv, 0, ops.on_device(k), ops.on_device(v), slots)
    REFERENCE.kv_write(theirs, 0, k, v, slots)
    ops.copy_blocks(kv, [(0, 1), (2, 0)])
    REFERENCE.copy_blocks(theirs, [(0, 1), (2, 0)])
    one = Batch(
        grid.i32([0]),
        grid.i32([11]),
        grid.i32([0, 1]),
        grid.i32([12]),
        grid.i32([[0, 1, 2]]),
        grid.i32([-1]),
        grid.i32([0]),
    )
    q = grid.normal(1, 32, seed=5)
    expected = REFERENCE.attention(q, theirs, 0, one, shape)
    near(ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, one, shape)), expected, 1e-2)
    codes = np.empty((12, 2, 16), np.uint8 if KV_TYPES[dtype] == 1 else np.uint16)
    if dtype in ("fp8_e4m3", "float16"):
        ops.driver.download(codes, kv.keys)
        from pageturner.formats import float8

        if dtype == "float16":
            assert (codes.view(np.float16) == theirs.k[0]).all()
            return
        scales = np.empty((12, 2), np.float32)
        ops.driver.download(scales, kv.k_scales)
        assert (float8.VALUES[codes] * scales[..., None] == theirs.k[0]).all()


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_blocks_of_padded_heads_are_copied_whole(ops: GpuOps, dtype: str) -> None:
    """The second block is the last one of the layer: what is behind it belongs to the next layer."""
    shape = AttentionShape(2, 2, 20, 0.2)
    spec = replace(grid.scaled(grid.kv_spec(4, 3, 2, 20, dtype)), layers=2)
    kv = ops.alloc_kv(spec)
    k, v, q = grid.normal(12, 40), grid.normal(12, 40, seed=1), grid.normal(1, 40, seed=2)
    for layer, rows in ((0, 4), (1, 12)):
        slots = np.where(np.arange(12) < rows, np.arange(12), -1).astype(np.int32)
        ops.kv_write(kv, layer, ops.on_device(k), ops.on_device(v), slots)
    assert kv.spec.nbytes == (12 * 2 * 2 * 2) * (32 * KV_TYPES[dtype] + 4 * (KV_TYPES[dtype] == 1))

    def seen(layer: int, block: int) -> np.ndarray:
        one = Batch(
            grid.i32([0]),
            grid.i32([3]),
            grid.i32([0, 1]),
            grid.i32([4]),
            grid.i32([[block]]),
            grid.i32([-1]),
            grid.i32([0]),
        )
        found: np.ndarray = ops.to_numpy(ops.attention(ops.on_device(q), kv, layer, one, shape))
        return found

    first = [seen(layer, 0) for layer in (0, 1)]
    ops.copy_blocks(kv, [(0, 2)])
    assert [seen(layer, block).tolist() for layer in (0, 1) for block in (0, 2)] == [
        first[0].tolist(),
        first[0].tolist(),
        first[1].tolist(),
        first[1].tolist(),
    ]
    assert kv.layer_bytes >= 12 * 2 * 32 * KV_TYPES[dtype]


# -- choosing ------------------------------------------------------------------------------------------------
@slow
@pytest.mark.timeout(900)
def test_sampling_draws_what_the_reference_draws(ops: GpuOps) -> None:
    rows, vocabulary = 8, 2600
    logits = 3 * grid.normal(rows, vocabulary, seed=8)
    logits[:, 100:140] = 6.0  # ties
    logits[3, 5] = np.nan
    logits[4, 9] = np.inf
    generator = grid.rng(9)
    temperature = np.where(np.arange(rows) % 5 == 0, 0, 0.7).astype(np.float32)
    top_k = generator.choice([0, 1, 7, 45], rows).astype(np.int32)
    top_p = generator.choice([1.0, 0.9, 0.3], rows).astype(np.float32)
    min_p = generator.choice([0.0, 0.02], rows).astype(np.float32)
    uniform = generator.random(rows, dtype=np.float32)
    draw = (temperature, top_k, top_p, min_p, uniform)
    expected = REFERENCE.sample(logits, *draw)
    got = ops.sample(logits, *draw)
    assert got.tolist() == expected.tolist()
    alone = ops.sample(logits[7:8], *(array[7:8] for array in draw))
    assert alone[0] == got[7]


@slow
def test_routes_equal_the_reference(ops: GpuOps) -> None:
    logits = grid.normal(9, 20, seed=3)
    logits[2, 4:9] = 1.5
    for scoring, normalise in (("softmax", True), ("softmax", False), ("sigmoid", True)):
        ids, weights = ops.route(logits, 3, normalise, scoring)
        expected = REFERENCE.route(logits, 3, normalise, scoring)
        assert (ids == expected[0]).all()
        near(weights, expected[1], 1e-6)


def test_greedy_rows_take_the_lowest_of_the_best(ops: GpuOps) -> None:
    logits = grid.normal(4, 2100, seed=8)
    logits[0, [2099, 70, 500]], logits[1, 5], logits[2, 2090] = 9.0, np.nan, np.inf
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    draw = (zeros, zeros.astype(np.int32), ones, zeros, zeros)
    assert ops.sample(logits, *draw).tolist() == REFERENCE.sample(logits, *draw).tolist()


def test_a_matrix_of_odd_columns_is_refused(ops: GpuOps) -> None:
    from pageturner.errors import EngineFault

    with pytest.raises(EngineFault, match="--device cpu") as told:
        ops.pack_weight(Tensor("w", "F32", (2, 10), np.zeros(80, np.uint8)))
    assert told.value.code == "gpu_weights"
