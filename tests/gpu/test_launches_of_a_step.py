"""How many kernels a step of single tokens is: each costs microseconds, whatever it computes."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.kernels.base import AttentionShape, Batch, KVSpec
from pageturner.kernels.gpu.ops import GpuOps
from support.null_gpu import NullDriver, model

SHAPES = {  # hidden, inner, heads; of Qwen3-0.6B, whose o and down are cut in parts of K, and of Qwen3-8B
    "0.6B": (1024, 3072, AttentionShape(16, 8, 128, 128**-0.5)),
    "8B": (4096, 12288, AttentionShape(32, 8, 128, 128**-0.5)),
}
LAYER = [
    "rms_norm",
    "dense",
    "qk_norm_rope_kv_write",
    "attend",
    "dense",
    "rms_norm",
    "gated_dense",
    "dense",
]


def decoding(batch: int, context: int) -> Batch:
    """A token of each sequence."""
    starts, ones = np.arange(batch + 1, dtype=np.int32), np.ones(batch, np.int32)
    table = np.zeros((batch, -(-context // 16)), np.int32)
    rows = starts[:-1]
    return Batch(ones, context * ones - 1, starts, context * ones, table, rows, rows)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_a_layer_is_eight_kernels(name: str, batch: int) -> None:
    hidden, inner, shape = SHAPES[name]
    launched = []
    for layers in (2, 3):
        driver = NullDriver()
        ops = GpuOps(driver, 4 << 30, graphs=False)
        stack, _ = model(layers, hidden, inner, shape, 2048)
        kv = ops.alloc_kv(
            KVSpec(layers, batch * 20, 16, shape.kv_heads, shape.head_dim, "bfloat16")
        )
        ops.hidden(stack, decoding(batch, 300), kv, None)
        launched.append(
            [
                kernel.partition(".")[0].replace("persistent", "dense")
                for kernel, *_ in driver.launched
            ]
        )
    two, three = launched
    at = two.index("rms_norm")
    assert two[at : at + len(LAYER)] == LAYER
    assert len(three) - len(two) == len(LAYER)
    assert len(two) - 2 * len(LAYER) <= 2, (
        "beside the layers: the embedding, and the rows that are wanted"
    )
