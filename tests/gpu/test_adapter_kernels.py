"""The products of LoRA adapters on a device against those of the values, and each row against itself in any
company."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.kernels.adapters import widened
from pageturner.kernels.gpu import adapters as module
from pageturner.kernels.gpu.catalogue import FLOATS, LORA_PARTS, lora_parts
from pageturner.kernels.reference import ReferenceOps
from support.adapters import as_kind

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support.adapted_product import INPUTS, OUTPUTS, VOCABULARY, Products  # noqa: E402

KINDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_kind", FLOATS)
def test_products_equal_those_of_the_values(kind: str, x_kind: str) -> None:
    """Of ranks that fill no block, one, and several; rows of three adapters in turn and of none."""
    here = Products(gpu_device.make_driver())
    whole = [here.weights(kind, rank, seed) for seed, rank in enumerate((3, 16, 37))]
    packed = [here.ops.pack_adapter(one, here.stack) for one in whole]
    x = grid.normal(24, INPUTS, seed=5)
    x = as_kind(x, {v: k for k, v in KINDS.items()}[x_kind])
    x = widened("BF16" if x_kind == "bf16" else "F32", x)
    of = [[*packed, None][row % 4] for row in range(24)]
    got = here.adapt(x, of, x_kind)
    for row in range(24):
        expected = np.ones(OUTPUTS)
        if row % 4 < 3:
            pair = whole[row % 4].layers[0]["o"]
            a, b = (widened(kind, one).astype(np.float64) for one in (pair.a, pair.b))
            expected = 1 + 1.5 * b @ (a @ x[row])
        bound = {"F16": 2e-3, "BF16": 2e-2}.get(kind, 0.0) if x_kind == KINDS[kind] else 0.0
        np.testing.assert_allclose(got[row], expected, atol=max(bound, 2e-5))


def test_rows_of_the_embedding_and_of_the_head() -> None:
    here, reference = Products(gpu_device.make_driver()), ReferenceOps()
    weights = here.weights("BF16", 5)
    packed, theirs = (
        here.ops.pack_adapter(weights, here.stack),
        reference.pack_adapter(weights, here.stack),
    )
    x, tokens = grid.normal(3, INPUTS), grid.i32([2, 10, 2])
    mine = here.ops.adapt_embedded(here.ops.on_device(x), tokens, [packed, packed, None])
    expected = reference.adapt_embedded(x, tokens, [theirs, theirs, None])
    np.testing.assert_allclose(here.ops.to_numpy(mine), expected, atol=1e-5)
    rows = [here.ops.on_device(one) for one in (x[:, :VOCABULARY].copy(), x)]
    y = here.ops.adapt(*rows, [None, packed, None], -1, "head")
    expected = reference.adapt(x[:, :VOCABULARY].copy(), x, [None, theirs, None], -1, "head")
    np.testing.assert_allclose(here.ops.to_numpy(y), expected, atol=1e-5)


def test_bits_of_a_row_in_every_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two parts of K, added by one program or by the second product."""
    here = Products(gpu_device.make_driver(), 2048)
    assert lora_parts(here.inputs)[1] == 2
    kinds = ("BF16", "F32", "F16", "BF16")
    weights = [here.weights(kind, 1 + 17 * i, i) for i, kind in enumerate(kinds)]
    packed = [here.ops.pack_adapter(one, here.stack) for one in weights]
    x = grid.normal(40, here.inputs, seed=7)
    of = [[*packed, None][row * row % 5] for row in range(20)]
    alone = np.concatenate([here.adapt(x[row : row + 1], of[row : row + 1]) for row in range(20)])
    assert (here.adapt(x[:20], of) == alone).all()
    assert (here.adapt(x[:5], [None] * 5) == 1).all()
    monkeypatch.setattr(module, "MANY_TILES", 0)
    assert (here.adapt(x[:20], of) == alone).all()


@pytest.mark.parametrize("columns", [16, 64, 1000, 1024, 4096, 14336, 28672])
def test_parts_of_k_cover_it(columns: int) -> None:
    chunk, parts = lora_parts(columns)
    assert (chunk % 64, (parts - 1) * chunk < columns <= parts * chunk) == (0, True)
    assert parts <= LORA_PARTS
