"""The reference backend against brute force in fp64, and against itself with other rows around each row."""

from __future__ import annotations

import numpy as np
import pytest
from grid import weight as quantised

from pageturner.formats import ggml
from pageturner.kernels.base import KV_TYPES, AttentionShape, Batch, KVSpec, Rope, Tensor
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.reference_arrays import quantise_rows
from support.poison import poison_blocks
from support.refusals import engine_fault

OPS = ReferenceOps()
SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=16, scale=0.25)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def tensor(values: np.ndarray, kind: str = "F32") -> Tensor:
    raw = np.ascontiguousarray(values, {"F32": np.float32, "F16": np.float16}[kind])
    return Tensor("w", kind, values.shape, raw.reshape(-1).view(np.uint8))


def random_tensor(kind: str, rows: int, columns: int) -> Tensor:
    """Quantised weights of ordinary size."""
    if kind in ("F32", "F16"):
        return tensor(normal(rows, columns), kind)
    return quantised(kind, rows, columns, seed=7)


def dense(t: Tensor) -> np.ndarray:
    return ggml.dequantise(t.kind, t.shape, t.data).astype(np.float64)


# -- linear, embedding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", *ggml.QUANTISED])
def test_linear_is_the_product_with_the_rounded_activations(kind: str) -> None:
    columns = max(96, 2 * ggml.BY_NAME[kind].values)
    weight = random_tensor(kind, 37, columns)
    x = normal(5, columns, seed=1)
    x[3, 32:64] = 0  # a group without any scale
    taken = x.astype(np.float64)
    if kind in ggml.QUANTISED:
        q, scale = quantise_rows(x, bits=8)
        taken = (q * scale[..., None].astype(np.float64)).reshape(x.shape)
    y = OPS.linear(x, OPS.pack_weight(weight))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, taken @ dense(weight).T, rtol=2e-6, atol=2e-6)


def test_linear_adds_the_bias() -> None:
    weight, bias = OPS.pack_weight(random_tensor("Q8_0", 8, 32)), OPS.pack_weight(tensor(normal(8)))
    x = normal(3, 32)
    np.testing.assert_array_equal(OPS.linear(x, weight, bias), OPS.linear(x, weight) + bias)


def test_activations_are_rounded_half_to_even_per_group() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :5] = [127, 0.5, 1.5, 2.5, -3.5]
    x[0, 32] = -0.25
    q, scale = quantise_rows(x, bits=8)
    assert q[0, 0, :5].tolist() == [127, 0, 2, 2, -4]
    assert q[0, 1, 0] == -127
    assert scale.tolist() == [[1.0, np.float32(0.25) / np.float32(127)]]


@pytest.mark.parametrize("kind", ["F32", "F16", *ggml.QUANTISED])
def test_embed_gives_the_rows_of_the_table(kind: str) -> None:
    table = random_tensor(kind, 20, 256)
    rows = OPS.embed(OPS.pack_weight(table), ints(7, 0, 7, 19))
    np.testing.assert_array_equal(rows, dense(table)[[7, 0, 7, 19]].astype(np.float32))


@pytest.mark.parametrize("kind", ["Q8_1", "I8"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with engine_fault(kind, code="weight_kind"):
        OPS.pack_weight(Tensor("w", kind, (1, 256), np.zeros(1, np.uint8)))


def test_quantised_rows_must_be_whole_groups() -> None:
    with engine_fault("multiple of 32"):
        OPS.pack_weight(Tensor("w", "Q8_0", (2, 48), np.zeros(1, np.uint8)))


# -- elementwise ---------------------------------------------------------------------------------------------


def test_norm() -> None:
    x, weight = normal(4, 50) * 3, normal(50, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(OPS.norm(x, weight, 1e-5), expected, rtol=1e-6)


def test_head_norm_normalises_each_head() -> None:
    x, weight = normal(3, 4 * 8), normal(8, seed=1)
    expected = np.concatenate(
        [OPS.norm(x[:, i : i + 8], weight, 1e-6) for i in range(0, 32, 8)], axis=1
    )
    np.testing.assert_array_equal(OPS.head_norm(x, weight, 1e-6, 8), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_each_pair_as_a_complex_number(interleaved: bool) -> None:
    heads, dim, rotary = 3, 8, 6  # the last two dimensions of a head pass through
    angles = np.outer(np.arange(10), [1.0, 0.3, 0.01])
    rope = Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved)
    x, positions = normal(4, heads * dim), ints(0, 9, 4, 4)
    out = OPS.rope(x, positions, rope, dim).reshape(4, heads, dim)
    for t, head in np.ndindex(4, heads):
        row = x.reshape(4, heads, dim)[t, head]
        for i in range(rotary // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
            turned = complex(row[a], row[b]) * np.exp(1j * angles[positions[t], i])
            np.testing.assert_allclose(
                out[t, head, [a, b]], [turned.real, turned.imag], rtol=1e-5, atol=1e-6
            )
        np.testing.assert_array_equal(out[t, head, rotary:], row[rotary:])


def test_act_mul_is_silu_times_up_and_survives_the_extremes() -> None:
    gate, up = (
        np.concatenate([normal(2, 30), [[-200.0], [200.0]]], axis=1, dtype=np.float32),
        normal(2, 31),
    )
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(OPS.act_mul(gate, up), expected, rtol=1e-6, atol=1e-30)


# -- attention -----------------------------------------------------------------------------------------------


def one_sequence(context: int, rows: int, block_size: int, seed: int = 3) -> tuple[Batch, int]:
    """The last `rows` positions of a sequence whose blocks lie scattered; and how many blocks there are."""
    needed = -(-context // block_size)
    table = rng(seed).permutation(needed + 3)[:needed].astype(np.int32)
    positions = np.arange(context - rows, context, dtype=np.int32)
    slots = table[positions // block_size] * block_size + positions % block_size
    zeros = np.zeros(rows, np.int32)
    return (
        Batch(zeros, positions, ints(0, rows), ints(context), table[None], slots, ints(rows - 1)),
        needed + 3,
    )


def attend(context: int, rows: int, block_size: int, dtype: str) -> np.ndarray:
    """Write all of K and V in one go, then attend from the last rows."""
    k, v, q = (normal(context, n * 16, seed=s) for n, s in ((2, 1), (2, 2), (6, 3)))
    whole, blocks = one_sequence(context, context, block_size)
    kv = OPS.alloc_kv(KVSpec(1, blocks, block_size, 2, 16, dtype))
    poison_blocks(kv, list(range(blocks)))
    OPS.kv_write(kv, 0, k, v, whole.slots)
    batch, _ = one_sequence(context, rows, block_size)
    return OPS.attention(q[context - rows :], kv, 0, batch, SHAPE)


@pytest.mark.parametrize("context", [1, 5, 256, 257, 600])
def test_attention_is_softmax_over_the_past(context: int) -> None:
    k, v, q = (
        normal(context, n * 16, seed=s).astype(np.float64) for n, s in ((2, 1), (2, 2), (6, 3))
    )
    rows = min(context, 3)
    expected = np.empty((rows, 6, 16))
    for i, position in enumerate(range(context - rows, context)):
        for head in range(6):
            part = slice(head // 3 * 16, head // 3 * 16 + 16)
            scores = k[: position + 1, part] @ q[position, head * 16 : head * 16 + 16] * SHAPE.scale
            weights = np.exp(scores - scores.max())
            expected[i, head] = weights / weights.sum() @ v[: position + 1, part]
    got = attend(context, rows, 16, "float32").reshape(rows, 6, 16)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_attention_does_not_depend_on_blocks_or_on_the_split_into_steps(dtype: str) -> None:
    once = attend(300, 300, 16, dtype)
    for rows, block_size in ((1, 16), (45, 1), (300, 256), (7, 3)):
        np.testing.assert_array_equal(attend(300, rows, block_size, dtype), once[300 - rows :])


def test_kv_is_rounded_to_its_type_and_slot_minus_one_is_written_nowhere() -> None:
    kv = OPS.alloc_kv(KVSpec(2, 2, 2, 1, 4, "float16"))
    k = normal(3, 4)
    k[1, 0] = 1e6
    OPS.kv_write(kv, 1, k, -k, ints(3, 0, -1))
    assert not kv.k[0].any()
    np.testing.assert_array_equal(
        kv.k[1, [3, 0], 0], np.where(k > 65504, np.inf, k)[:2].astype(np.float16)
    )
    np.testing.assert_array_equal(kv.v[1], -kv.k[1])
    assert not kv.k[1, [1, 2]].any()


def test_blocks_are_copied_and_poisoned_whole() -> None:
    kv = OPS.alloc_kv(KVSpec(2, 4, 3, 1, 4, "float32"))
    kv.k[:] = normal(*kv.k.shape)
    source = kv.k[:, 3:6].copy()
    OPS.copy_blocks(kv, [(1, 3), (3, 0)])
    poison_blocks(kv, [1])
    np.testing.assert_array_equal(kv.k[:, 9:12], source)
    np.testing.assert_array_equal(kv.k[:, 0:3], source)
    assert np.isnan(kv.k[:, 3:6]).all()
    assert not np.isnan(kv.k[:, 6:]).any()


def test_int8_kv_keeps_127_steps_of_each_head() -> None:
    kv = OPS.alloc_kv(KVSpec(1, 1, 4, 2, 4, "int8"))
    k = np.array([[127, -3.5, 2.5, 0.4, 0, 0, 0, 0]], np.float32)
    OPS.kv_write(kv, 0, k, -k / 254, ints(1))
    np.testing.assert_array_equal(kv.k[0, 1], [[127, -4, 2, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(kv.v[0, 1, 0], np.array([-127, 4, -2, 0]) / 254, rtol=1e-6)
    assert KVSpec(30, 10, 16, 3, 64, "int8").nbytes == 160 * 30 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize(
    ("dtype", "blocks", "code"), [("int4", 1, "kv_dtype"), ("float32", 1 << 50, "kv_memory")]
)
def test_kv_that_cannot_be(dtype: str, blocks: int, code: str) -> None:
    with engine_fault(code=code):
        OPS.alloc_kv(KVSpec(1, blocks, 16, 1, 16, dtype))


# -- batch invariance ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("columns", [256, 768])
def test_linear_gives_the_same_bits_in_any_crowd(kind: str, columns: int) -> None:
    weight = OPS.pack_weight(random_tensor(kind, 131, columns))
    x = normal(40, columns, seed=5)
    alone = np.concatenate([OPS.linear(row[None], weight) for row in x])
    for start, stop in ((0, 40), (0, 2), (3, 20), (33, 40)):
        np.testing.assert_array_equal(OPS.linear(x[start:stop], weight), alone[start:stop])


def test_elementwise_gives_the_same_bits_in_any_crowd() -> None:
    x, y, weight = normal(23, 77), normal(23, 77, seed=1), normal(77, seed=2)
    for start, stop in ((0, 1), (5, 7), (2, 23)):
        part = slice(start, stop)
        np.testing.assert_array_equal(
            OPS.norm(x[part], weight, 1e-5), OPS.norm(x, weight, 1e-5)[part]
        )
        np.testing.assert_array_equal(OPS.act_mul(x[part], y[part]), OPS.act_mul(x, y)[part])


# -- choosing tokens -----------------------------------------------------------------------------------------


def draw(
    logits: np.ndarray,
    uniform: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    row = np.asarray(logits, np.float32)[None]
    uniforms = floats(uniform)
    return int(
        OPS.sample(row, floats(temperature), ints(top_k), floats(top_p), floats(min_p), uniforms)[0]
    )


def support(logits: np.ndarray, **settings: float) -> set[int]:
    return {draw(logits, u, **settings) for u in np.linspace(0, 0.999, 500)}  # type: ignore[arg-type]


PROBABILITIES = np.log([0.1, 0.4, 0.2, 0.25, 0.05])


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(np.array([1.0, 3.0, 2.0, 3.0]), 0.9, temperature=0.0) == 1


def test_the_token_is_found_by_the_running_sum_in_id_order() -> None:
    bounds = [
        (0.0, 0),
        (0.09, 0),
        (0.11, 1),
        (0.49, 1),
        (0.51, 2),
        (0.69, 2),
        (0.71, 3),
        (0.96, 4),
        (0.99999, 4),
    ]
    assert [draw(PROBABILITIES, u) for u, _ in bounds] == [token for _, token in bounds]


def test_filters_keep_what_they_should() -> None:
    assert support(PROBABILITIES) == {0, 1, 2, 3, 4}
    assert support(PROBABILITIES, top_k=2) == {1, 3}
    assert support(PROBABILITIES, top_k=-1) == {0, 1, 2, 3, 4}
    assert support(PROBABILITIES, top_k=99) == {0, 1, 2, 3, 4}
    assert support(PROBABILITIES, top_p=0.6) == {1, 3}
    assert support(PROBABILITIES, top_p=0.7) == {1, 2, 3}
    assert support(PROBABILITIES, top_p=1e-9) == {1}
    assert support(PROBABILITIES, min_p=0.45) == {1, 2, 3}
    # top_p is a share of what top_k left: 0.4 / 0.65 reaches 0.6 alone.
    assert support(PROBABILITIES, top_k=2, top_p=0.6) == {1}
    assert support(PROBABILITIES, min_p=0.45, top_k=2) == {1, 3}


def test_ties_at_the_edge_go_to_the_smaller_id() -> None:
    assert support(np.array([0.0, 5.0, 5.0, 5.0]), top_k=2) == {1, 2}


def test_temperature_sharpens() -> None:
    assert support(PROBABILITIES, temperature=0.01) == {1}
    assert draw(PROBABILITIES, 0.5, temperature=1e-30) == 1


def test_masked_tokens_are_never_drawn() -> None:
    masked = PROBABILITIES.copy()
    masked[[1, 4]] = -np.inf
    assert support(masked) == {0, 2, 3}


def test_draws_follow_the_distribution() -> None:
    uniforms = (np.arange(20_000) + 0.5).astype(np.float32) / 20_000
    logits = np.repeat(PROBABILITIES[None].astype(np.float32), len(uniforms), axis=0)
    ones, zeros = np.ones_like(uniforms), np.zeros_like(uniforms)
    tokens = OPS.sample(logits, ones, zeros.astype(np.int32), ones, zeros, uniforms)
    np.testing.assert_allclose(np.bincount(tokens) / len(tokens), np.exp(PROBABILITIES), atol=1e-3)


def test_top_logprobs() -> None:
    logits = normal(3, 100) * 5
    logits[1, 40] = logits[1, 17] = 99
    lse, ids, logprobs = OPS.top_logprobs(logits, 4)
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(lse, np.log(np.exp(wide).sum(axis=1)), rtol=1e-6)
    for row in range(3):
        best = sorted(range(100), key=lambda i, row=row: (-logits[row, i], i))[:4]
        assert ids[row].tolist() == best
    np.testing.assert_allclose(logprobs, np.take_along_axis(wide, ids, 1) - lse[:, None], atol=1e-5)
    assert OPS.top_logprobs(logits, 1000)[1].shape == (3, 100)
    assert OPS.top_logprobs(logits, 0)[1].shape == (3, 0)
