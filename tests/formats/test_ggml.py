"""Block formats, bit for bit against what the `gguf` package gives (see tests/tools/record_dequant.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pageturner.formats import ggml
from support.refusals import engine_fault

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "dequant.npz")
KINDS = ggml.IN_FILES


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_bit_equal_to_the_golden(kind: str) -> None:
    expected = GOLDEN[f"{kind}_values"]
    got = ggml.dequantise(kind, expected.shape, GOLDEN[f"{kind}_raw"])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_gives_the_size(kind: str) -> None:
    geometry = ggml.BY_NAME[kind]
    assert (
        GOLDEN[f"{kind}_values"].size // geometry.values * geometry.nbytes
        == GOLDEN[f"{kind}_raw"].size
    )


def test_an_unknown_kind_is_refused_by_name() -> None:
    with engine_fault("Q8_1", code="weight_kind"):
        ggml.dequantise("Q8_1", (1, 32), np.zeros(40, np.uint8))
