"""Weights made into integers at load time: how exact they are, and which stay as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pageturner.formats import ggml
from pageturner.kernels.base import Tensor
from pageturner.kernels.reference import Quantised, ReferenceOps
from pageturner.models.load import load_model, open_model
from pageturner.models.quantise import quantise, rounded
from pageturner.models.weights import LoadOptions, load_weights
from support.refusals import engine_fault

GOLDENS = Path(__file__).parents[1] / "goldens"


def tensor(values: np.ndarray, kind: str = "F32") -> Tensor:
    if kind == "BF16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = values.astype({"F32": np.float32, "F16": np.float16}[kind])
    return Tensor("w", kind, values.shape, np.ascontiguousarray(raw).reshape(-1).view(np.uint8))


def values_of(t: Tensor) -> np.ndarray:
    return ggml.dequantise(t.kind, t.shape, t.data)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.006), ("int4", 0.085)])
def test_error_is_what_the_flag_says(kind: str, quantization: str, bound: float) -> None:
    weight = tensor(normal(70, 96) * 0.02, kind)
    got, true = values_of(quantise(weight, quantization)), values_of(weight)
    error = float(np.sqrt(np.mean((got - true) ** 2) / np.mean(true**2)))
    assert bound / 2 < error < bound


@pytest.mark.parametrize(("quantization", "steps"), [("int8", 254), ("int4", 15)])
def test_each_value_is_the_nearest_of_its_group(quantization: str, steps: int) -> None:
    x = normal(40, 64) * np.logspace(-2, 3, 40, dtype=np.float32)[:, None]
    got, groups = values_of(quantise(tensor(x), quantization)), x.reshape(-1, 32)
    spread = groups.max(axis=1) - groups.min(axis=1)
    spread = 2 * np.abs(groups).max(axis=1) if quantization == "int8" else spread
    # Half a step, and what fp16 loses of the scale (times 127 or 15) and of the minimum.
    bound = spread / steps * 0.5 + np.abs(groups).max(axis=1) * 2**-10
    assert (np.abs(got - x).reshape(-1, 32) <= bound[:, None]).all()


def by_definition(x: np.ndarray, quantization: str) -> np.ndarray:
    """One group of 32 values, as the module's docstring says it."""
    limit = np.float32(np.finfo(np.float16).max)
    least, most = (
        (np.abs(x).max() * np.float32([-1, 1])) if quantization == "int8" else (x.min(), x.max())
    )
    zero = np.float16(0 if quantization == "int8" else np.clip(least, -limit, limit))
    steps = (most, np.float32(127)) if quantization == "int8" else (most - least, np.float32(15))
    scale = np.float16(np.minimum(np.divide(*steps), limit))
    inverse = np.float32(1) / np.float32(scale) if scale > 0 else np.float32(0)
    q = np.rint((x - np.float32(zero)) * inverse)
    if quantization == "int8":
        return np.concatenate([[scale.view(np.int16)], np.clip(q, -127, 127)]).astype(np.int16)
    return np.concatenate([[scale.view(np.int16), zero.view(np.int16)], np.clip(q, 0, 15)]).astype(
        np.int16
    )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_block_is_the_definition(quantization: str) -> None:
    """Ordinary groups, scales below what fp16 holds exactly, values above what it holds at all, and zeros."""
    x = normal(60, 96) * np.logspace(-9, 7, 60, dtype=np.float32)[:, None] + np.float32(
        0.5
    ) * normal(60, 1)
    x[7] = 0
    blocks = quantise(tensor(x), quantization).data.reshape(60 * 3, -1)
    head = 1 if quantization == "int8" else 2
    numbers = np.ascontiguousarray(blocks[:, : 2 * head]).view(np.int16)
    q = blocks[:, 2 * head :]
    q = q.view(np.int8) if quantization == "int8" else np.concatenate([q & 15, q >> 4], axis=1)
    expected = np.array([by_definition(group, quantization) for group in x.reshape(-1, 32)])
    assert np.array_equal(np.concatenate([numbers, q], axis=1), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_groups_without_spread(quantization: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1], x[2, :32] = 0.5, 1e-9
    got = values_of(quantise(tensor(x), quantization))
    np.testing.assert_allclose(got, x, atol=1e-3)
    assert not got[0].any()


def test_large_matrices_pass_in_parts() -> None:
    x = normal(300, 4096)
    whole = values_of(quantise(tensor(x), "int8"))
    assert np.array_equal(whole[290:], values_of(quantise(tensor(x[290:]), "int8")))


def test_what_stays_as_it_is() -> None:
    for t in (
        tensor(normal(64)),
        tensor(normal(4, 33)),
        Tensor("q", "Q4_1", (1, 32), np.zeros(20, np.uint8)),
    ):
        assert quantise(t, "int8") is t
    assert quantise(tensor(normal(4, 32)), "none").kind == "F32"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad: float, quantization: str) -> None:
    x = normal(4, 32)
    x[2, 5] = bad
    with engine_fault(r"'w'.*finite"):
        quantise(tensor(x), quantization)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_model_quantised_at_load(dtype: str) -> None:
    """int4 keeps embedding and head in 8 bits; norms stay; with dtype=float32 it takes whatever was there."""
    path = GOLDENS / ("tiny_llama.gguf" if dtype == "auto" else "tiny_llama_quant.gguf")
    options = LoadOptions(dtype=dtype, max_positions=64, quantization="int4")
    weights = load_weights(open_model(path), ReferenceOps(), options)
    assert isinstance(weights.embed, Quantised)
    assert weights.embed.low is None
    for layer in weights.layers:
        assert layer.q.low is not None
        assert layer.down.low is not None
        assert layer.attn_norm.dtype == np.float32


def test_an_unknown_quantization_is_refused() -> None:
    with engine_fault(r"int3.*int8"):
        load_model(GOLDENS / "tiny_llama.gguf", ReferenceOps(), quantization="int3")


def test_a_kind_without_a_kernel_becomes_int8_with_scales_for_16_values() -> None:
    draw = np.random.default_rng(3)
    raw = draw.integers(0, 256, (5, 2, 84), dtype=np.uint8)
    raw[..., 80:82] = np.float16(0.02).reshape(1).view(np.uint8)
    raw[..., 82:84] = np.float16(0.03).reshape(1).view(np.uint8)
    tensor = Tensor("w", "Q2_K", (5, 512), raw.reshape(-1))
    made = rounded(tensor)
    assert made.kind == "Q8_W"
    expected, got = (ggml.dequantise(t.kind, t.shape, t.data) for t in (tensor, made))
    assert np.sqrt(np.mean((expected - got) ** 2) / np.mean(expected**2)) < 0.004
    raw[3, 1, 80:82] = np.float16(np.nan).reshape(1).view(np.uint8)
    with engine_fault("not finite"):
        rounded(Tensor("w", "Q2_K", (5, 512), raw.reshape(-1)))
