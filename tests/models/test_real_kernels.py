"""Kernels on the weights of real models, against fp32 products of the dequantised ones: every type on a piece
of one matrix (tests/tools/record_real_rows.py), and whole files, which are skipped where they are absent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pageturner.formats import ggml
from pageturner.formats.gguf import open_gguf
from pageturner.formats.hub import cache_folder
from pageturner.kernels.base import Ops, Tensor
from support.decoding import backend

CORNER = np.load(Path(__file__).parents[1] / "goldens" / "real_rows.npz")
ROWS, EACH = 512, 3  # rows of a tensor, tensors of a kind


def product_error(ops: Ops, weight: Tensor, values: np.ndarray) -> float:
    """Relative error (root mean square) of products with Gaussian activations; rows must be exact."""
    packed = ops.pack_weight(weight)
    rows, k = weight.shape
    assert np.array_equal(ops.embed(packed, np.arange(rows, dtype=np.int32)), values), weight.name
    x = np.random.default_rng(0).standard_normal((8, k), dtype=np.float32)
    true = x.astype(np.float64) @ values.T.astype(np.float64)
    return float(np.sqrt(np.mean((ops.linear(x, packed) - true) ** 2) / np.mean(true**2)))


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize(
    "kind", [name.removesuffix("_raw") for name in CORNER if name.endswith("_raw")]
)
def test_every_type_on_real_weights(name: str, kind: str) -> None:
    """Values are bit-equal to those of the `gguf` package. Products of floats are exact to fp32; those of
    integers err by the rounding of the activations: 0.5 to 0.6 % with 8 bits, 0.034 % with 12, 0.002 % with
    15."""
    values, raw = CORNER[f"{kind}_values"], CORNER[f"{kind}_raw"]
    assert np.array_equal(
        ggml.dequantise(kind, values.shape, raw).view(np.uint32), values.view(np.uint32)
    )
    ops = backend(name)
    errors = [
        product_error(ops, Tensor(kind, kind, values.shape, raw, bits), values)
        for bits in (8, 12, 15)
    ]
    if kind in ggml.QUANTISED:
        assert 0.003 < errors[0] < 0.008
        twelve = ops.default_activation_bits("Q4_0") == 12  # else as with 15
        assert (2e-4 if twelve else 5e-6) < errors[1] < (5e-4 if twelve else 4e-5)
        assert 5e-6 < errors[2] < 4e-5
    else:
        assert max(errors) < 1e-6


@pytest.mark.model
@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("smollm2-135m-instruct-q4_1.gguf", {"Q4_1", "Q8_0"}),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", {"Q8_0", "Q5_0", "Q4_K", "Q6_K"}),
        ("gemma3-270m-q4_k_m.gguf", {"Q8_0", "Q5_0", "Q4_K", "Q6_K"}),
    ],
)
def test_products_and_rows_of_real_weights(file: str, kinds: set[str]) -> None:
    """Rows are exact; the error of products is that of int8 activations in groups of 32: 0.5 to 0.6 %."""
    path = cache_folder() / file
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    ops, gguf, seen = backend("native"), open_gguf(path), Counter[str]()
    for name, info in gguf.tensors.items():
        if len(info.shape) != 2 or info.kind == "F32" or seen[info.kind] == EACH:
            continue
        seen[info.kind] += 1
        kind, (n, k), raw = gguf.tensor(name)
        rows = min(n, ROWS)
        data = np.frombuffer(raw, np.uint8)[: len(raw) // n * rows]
        values = ggml.dequantise(kind, (rows, k), data)
        error = product_error(ops, Tensor(name, kind, (rows, k), data), values)
        assert 0.003 < error < 0.008, (name, kind, error)
    assert set(seen) == kinds
