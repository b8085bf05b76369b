"""GGUF types with grids: what they are widened to holds the very values, and models of them compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pageturner.formats.ggml import WIDENED, dequantise
from pageturner.kernels.base import Tensor
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import open_model, what_becomes
from pageturner.models.quantise import widened
from support.decoding import logits
from support.grid_models import make_models
from support.hf_folder import GOLDENS

GOLDEN = np.load(GOLDENS / "dequant.npz")
PROMPT = list(range(3, 20))


@pytest.mark.parametrize("kind", WIDENED)
def test_widening_keeps_every_bit(kind: str) -> None:
    expected = GOLDEN[f"{kind}_values"]
    got = widened(Tensor("w", kind, expected.shape, GOLDEN[f"{kind}_raw"]))
    values = dequantise(got.kind, got.shape, got.data)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", WIDENED)
def test_a_model_of_this_type(kind: str, tmp_path: Path) -> None:
    quantised, floats = make_models(tmp_path, kind)
    expected = logits(floats, PROMPT)
    for backend in [ReferenceOps(), *(NativeOps(1) for _ in available_isas()[:1])]:
        got = logits(quantised, PROMPT, backend)
        assert np.sqrt(np.mean((got - expected) ** 2)) < 0.03 * expected.std()
    (line,) = what_becomes(open_model(quantised).file)
    assert kind in line
    assert "exact" in line
    assert line.endswith("in 7 matrices")
