"""Whole KV blocks as bytes: what one gives the other takes, for every backend, type and form of KV."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.kernels.base import KV_TYPES, KVSpec, Ops
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.reference import ReferenceOps
from pageturner.kv.kv_file import row_sums

BACKENDS = ["reference", *(["native"] if native_module.available_isas() else [])]


def ops_of(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else NativeOps(threads=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(KV_TYPES))
@pytest.mark.parametrize("latent", [False, True])
def test_blocks_travel_between_storages(backend: str, dtype: str, latent: bool) -> None:
    ops = ops_of(backend)
    here, there = (ops.alloc_kv(KVSpec(3, blocks, 4, 2, 8, dtype, latent)) for blocks in (5, 3))
    rng = np.random.default_rng(1)
    for layer in range(3):
        k, v = (rng.standard_normal((20, 16)).astype(np.float32) for _ in range(2))
        ops.kv_write(here, layer, k, None if latent else v, np.arange(20, dtype=np.int32))
    nbytes = ops.block_bytes(here)
    sent, back = np.zeros((2, nbytes), np.uint8), np.zeros((2, nbytes), np.uint8)
    ops.read_blocks(here, np.array([4, 1], np.int32), sent)
    assert sent[0].any()
    assert (sent[0] != sent[1]).any()
    ops.write_blocks(there, np.array([0, 2], np.int32), sent)
    ops.read_blocks(there, np.array([2, 0], np.int32), back)
    assert np.array_equal(back[::-1], sent)
    ops.read_blocks(there, np.array([1, 1], np.int32), back)
    assert not back.any()  # nobody else's block was touched


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sum_is_of_all_bytes_and_the_key(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled and not native_module.available_isas():
        pytest.skip("the kernels are not compiled")
    if not compiled:
        monkeypatch.setattr(native_module, "available_isas", list)
    rows = np.random.default_rng(2).integers(0, 256, (3, 1001), np.uint8)
    seeds = np.arange(3, dtype=np.uint64)
    sums = row_sums(rows, seeds)
    assert len({*sums.tolist()}) == 3
    for place in (0, 500, 1000):
        rows[1, place] ^= 1
        assert (row_sums(rows, seeds) == sums).tolist() == [True, False, True]
        rows[1, place] ^= 1
    assert (row_sums(rows, seeds + np.uint64(1)) != sums).all()
    assert np.array_equal(row_sums(rows, seeds), sums)
    if compiled:
        expected = [native_module.module().xxh64(row.tobytes(), n) for n, row in enumerate(rows)]
        assert sums.tolist() == expected
