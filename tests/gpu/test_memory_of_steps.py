"""Models of real shapes on a device that computes nothing: which steps fit into their memory, and which are
recorded. No step that a dry run lets through may fail later on."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.engine.devices import largest_batch
from pageturner.errors import EngineFault
from pageturner.kernels.base import AttentionShape, Batch, KVSpec, Stack
from pageturner.kernels.choosing import Head
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import Room, bucket, fits_at_once, segments_bucket, views_of
from support.null_gpu import NullDriver, model

GB = 1 << 30
Model = tuple[Stack, Head]
LLAMA_8B = model(2, 4096, 14336, AttentionShape(32, 8, 128, 0.1), 128256)
QWEN3_8B = model(2, 4096, 12288, AttentionShape(32, 8, 128, 0.1), 151936)
FALCON_7B = model(2, 4544, 18176, AttentionShape(71, 1, 64, 0.1), 65024)


class Engine:
    """A model whose steps have this much memory, behind the dry run of an engine."""

    def __init__(
        self, found: Model, sequences: int, length: int, budget: int = 512, memory: int = 2 * GB
    ) -> None:
        """EngineFault('gpu_memory') where the largest step does not fit."""
        self.stack, self.head = found
        self.length = length
        shape = self.stack.layers[0].shape
        self.ops = GpuOps(NullDriver(), memory)
        spec = KVSpec(len(self.stack.layers), 1, 16, shape.kv_heads, shape.head_dim, "float16")
        self.kv = self.ops.alloc_kv(spec)
        self.forward(largest_batch(budget, min(sequences, budget), length, 16))

    def forward(self, batch: Batch) -> None:
        self.ops.raw_logits(self.ops.hidden(self.stack, batch, self.kv, None), self.head)

    def decode(self, contexts: list[int]) -> bool:
        """A step of a token of each sequence; whether it was replayed."""
        rows = len(contexts)
        context = np.array(contexts, np.int32)
        starts = np.arange(rows + 1, dtype=np.int32)
        table = np.zeros((rows, -(-max(contexts) // 16)), np.int32)
        before = len(self.ops.graphs.recorded) if self.ops.graphs else 0
        self.forward(
            Batch(starts[:-1], context - 1, starts, context, table, starts[:-1], starts[:-1])
        )
        return self.ops.graphs is not None and len(self.ops.graphs.recorded) > before


@pytest.mark.parametrize(("longest", "sequences"), [(33_000, 256), (40_960, 256), (40_000, 200)])
def test_one_long_context_among_many_short_ones_is_recorded(longest: int, sequences: int) -> None:
    engine = Engine(QWEN3_8B, sequences, 40_960)
    contexts = [longest, *[200] * (sequences - 1)]
    assert [engine.decode(contexts) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("budget", [512, 8192])
def test_a_model_starts_at_its_whole_context(budget: int) -> None:
    engine = Engine(LLAMA_8B, 128, 131_072, budget)
    assert [engine.decode([3906] * 128) for _ in range(2)] == [False, True]  # half a million tokens


def test_prefixes_that_all_share_are_computed_in_rounds() -> None:
    engine = Engine(LLAMA_8B, 128, 131_072)
    engine.ops.driver.launched.clear()
    assert [engine.decode([131_072] * 128) for _ in range(3)] == [False] * 3
    attends = [grid for name, grid, _ in engine.ops.driver.launched if name.startswith("attend")]
    assert len(attends) > 3 * 2  # more than one of each layer


@pytest.mark.parametrize("sequences", [3, 64, 250, 256])
@pytest.mark.parametrize("length", [200, 4096, 32_768])
@pytest.mark.parametrize("found", [LLAMA_8B, FALCON_7B])
def test_what_a_dry_run_lets_through_is_recorded(found: Model, length: int, sequences: int) -> None:
    """With the least memory with which an engine starts, and with more."""
    small, large = 1 << 20, 2 * GB
    while large - small > 1 << 16:
        middle = (small + large) // 2
        try:
            Engine(found, sequences, length, sequences, middle)
            large = middle
        except EngineFault:
            small = middle
    for memory in (large, 2 * large, 4 * large, 16 * large):
        engine = Engine(found, sequences, length, sequences, memory)
        segments = sequences * -(-length // 256) + bucket(sequences) - sequences
        views = views_of(engine.stack, 1)[0]
        at_once = fits_at_once(
            views, bucket(sequences), Room(segments_bucket(segments)), engine.ops.arena
        )
        assert [engine.decode([length] * sequences) for _ in range(2)].count(True) == at_once
        engine.decode([1, *[length] * (sequences - 1)])


def test_rows_of_many_heads_are_no_more_programs_than_a_grid_has() -> None:
    """A tile of 64 rows has one row of 48 heads: NullDriver looks at every grid."""
    wide = model(1, 6144, 1024, AttentionShape(48, 1, 128, 0.1), 100)
    Engine(wide, 1, 70_000, 70_000, 16 * GB)
