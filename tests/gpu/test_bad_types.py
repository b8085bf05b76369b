"""Number formats on a device: what it has none of is refused with a code, and no architecture lacks fp8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.base import KV_TYPES, KVSpec, Tensor
from pageturner.kernels.gpu.catalogue import ARCHITECTURES, kernels_of
from pageturner.kernels.gpu.ops import GpuOps


def device() -> tuple[GpuOps, list[int]]:
    """Its driver takes memory and computes nothing. What is taken is noted."""
    taken: list[int] = []

    def alloc(nbytes: int) -> int:
        taken.append(nbytes)
        return 4096

    driver: Any = SimpleNamespace(
        name="Fake",
        architecture=90,
        fingerprint="f",
        memory=lambda: (1 << 30, 1 << 30),
        alloc=alloc,
        clear=lambda *_: None,
    )
    ops = GpuOps(driver, 1 << 20, graphs=False)
    taken.clear()
    return ops, taken


@pytest.mark.parametrize(
    ("dtype", "head", "code", "told"),
    [
        ("float8_e5m2", 64, "kv_dtype", "fp8_e4m3"),
        ("int4", 64, "kv_dtype", "there are int8"),
        ("float32", 256, "gpu_model", "heads of 256 elements in float32"),
        ("float16", 512, "gpu_model", "heads of 512 elements"),
    ],
)
def test_kv_that_a_device_lacks_is_refused_before_memory_is_taken(
    dtype: str, head: int, code: str, told: str
) -> None:
    ops, taken = device()
    spec = KVSpec(layers=1, blocks=2, block_size=16, kv_heads=2, head_dim=head, dtype=dtype)
    with pytest.raises(EngineFault, match=told) as fault:
        ops.alloc_kv(spec)
    assert (fault.value.code, taken) == (code, [])


def test_weights_of_a_type_that_is_lacking_are_refused_by_name() -> None:
    ops, taken = device()
    with pytest.raises(EngineFault, match="weights of kind Q2_X are not supported") as fault:
        ops.pack_weight(Tensor("w", "Q2_X", (4, 32), np.zeros(64, np.uint8)))
    assert (fault.value.code, taken) == ("weight_kind", [])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_architecture_lacks_fp8_or_a_kind_of_kv(architecture: int) -> None:
    """fp8 is how values lie in memory, and products are in bf16 or fp16: devices without instructions for it
    (sm_80, sm_86) have it too."""
    kernels = kernels_of(architecture)
    assert any(name.startswith("groups.fp8") for name in kernels)
    assert "embed_groups.fp8" in kernels
    for dtype in KV_TYPES:
        assert any(name.startswith("attend") and dtype in name for name in kernels), dtype
