"""Recorded steps on the interpreted device give the bits of plain ones: layers with a window whose blocks are
others, contexts that outgrow a recording, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support.engines import GOLDENS  # noqa: E402

BLOCK, BLOCKS = 16, 80


class Driver(fake_gpu.FakeDriver):
    """One whose recordings may not fit."""

    full = False

    def end_recording(self) -> object:
        graph = super().end_recording()
        if self.full:
            raise EngineFault("gpu_memory", "no room for a recording")
        return graph


class Decoding:
    """Steps of sequences in the middle of contexts of random keys and values."""

    def __init__(self, model: str, graphs: bool) -> None:
        self.driver = Driver()
        self.ops = GpuOps(self.driver, 64 << 20, graphs)
        self.decoder: Decoder = load_model(GOLDENS / "families" / model, self.ops, dtype="float32")
        specs = self.decoder.kv_specs(BLOCKS, BLOCKS, BLOCK, "float16")
        self.storage = [self.ops.alloc_kv(spec) for spec in specs]
        for seed, kv in enumerate(self.storage):
            values = grid.normal(kv.layer_bytes // 2 * kv.spec.layers, seed=seed).astype(np.float16)
            for address in (kv.keys, kv.values):
                self.driver.upload(address, values)

    def step(self, contexts: list[int]) -> np.ndarray:
        """The hidden rows of a token of each sequence; layers with a window read other blocks."""
        rows = len(contexts)
        context = np.array(contexts, np.int32)
        table = np.arange(rows * 40, dtype=np.int32).reshape(rows, 40)
        whole, beside = (self._batch(context, one) for one in (table, BLOCKS - 1 - table))
        hidden = self.decoder.hidden(whole, self.storage[0], (beside, self.storage[1]))
        return self.ops.to_numpy(hidden)

    @staticmethod
    def _batch(context: np.ndarray, table: np.ndarray) -> Batch:
        rows = np.arange(len(context) + 1, dtype=np.int32)
        last = context - 1
        slots = table[rows[:-1], last // BLOCK] * BLOCK + last % BLOCK
        return Batch(rows[:-1] + 7, last, rows, context, table, slots, rows[:-1])


@pytest.mark.parametrize("model", ["gemma3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_steps_of_layers_with_a_window_are_recorded(model: str) -> None:
    plain, recorded = Decoding(model, False), Decoding(model, True)
    for contexts in ([300, 9], [301, 10], [302, 1], [500, 30]):
        assert (plain.step(contexts) == recorded.step(contexts)).all()
    assert recorded.driver.replayed == 3
    assert len(recorded.ops.graphs.recorded) == 1


def test_a_step_whose_recording_does_not_fit_is_computed_without() -> None:
    plain, recorded = Decoding("gemma3", False), Decoding("gemma3", True)
    recorded.driver.full = True
    for _ in range(3):
        assert (plain.step([300, 9]) == recorded.step([300, 9])).all()
    assert (recorded.driver.replayed, recorded.ops.graphs.recorded) == (0, {})
    recorded.driver.full = False
    assert (plain.step([300, 9]) == recorded.step([300, 9])).all()
    assert recorded.driver.replayed == 0


@pytest.mark.slow
def test_a_step_with_no_memory_for_its_partials_twice_is_computed_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recording needs more of the arena than the step: it is dropped, and nothing else."""
    plain, recorded = Decoding("gemma3", False), Decoding("gemma3", True)
    take = recorded.ops.arena.take

    def less(shape: tuple[int, ...], kind: str = "fp32") -> object:
        if recorded.driver.recording is not None and shape[-1:] == (64,) and shape[0] > 1:
            raise EngineFault("gpu_memory", "a step needs more")
        return take(shape, kind)

    monkeypatch.setattr(recorded.ops.arena, "take", less)
    for _ in range(3):
        assert (plain.step([300, 9]) == recorded.step([300, 9])).all()
    assert recorded.driver.replayed == 0
