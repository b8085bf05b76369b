"""Integer kernels on the weights of real models, against fp32 products of the dequantised ones. Skipped where
the files are absent."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pageturner.files import ggml
from pageturner.files.gguf import open_gguf
from pageturner.files.hub import cache_folder
from pageturner.kernels.base import Tensor
from support.decoding import backend

ROWS, EACH = 512, 3  # rows of a tensor, tensors of a kind


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
        packed = ops.pack_weight(Tensor(name, kind, (rows, k), data))
        assert np.array_equal(ops.embed(packed, np.arange(rows, dtype=np.int32)), values), name
        x = np.random.default_rng(0).standard_normal((8, k), dtype=np.float32)
        true = x.astype(np.float64) @ values.T.astype(np.float64)
        error = np.sqrt(np.mean((ops.linear(x, packed) - true) ** 2) / np.mean(true**2))
        assert 0.003 < error < 0.008, (name, kind, error)
    assert set(seen) == kinds
