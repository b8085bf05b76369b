"""Which sizes of steps are recorded: what comes twice, at most so many, those that are used most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch
from pageturner.kernels.gpu import graphs
from pageturner.kernels.gpu.arrays import GpuArray


def decoding(rows: int) -> Batch:
    ones = np.ones(rows, np.int32)
    starts = np.arange(rows + 1, dtype=np.int32)
    return Batch(ones, ones, starts, ones, np.zeros((rows, 1), np.int32), ones, starts[:-1])


def test_the_sizes_that_are_used_most_have_the_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    computed: list[int] = []
    driver: Any = SimpleNamespace(
        replay=lambda graph: None, forget=forgotten.append, begin_recording=lambda: None,
        end_recording=lambda: f"of {computed[-1]}",
    )  # fmt: skip
    arena: Any = SimpleNamespace(reset=lambda mark=0: None, mark=0)
    found = graphs.Graphs(driver, arena)
    kv: Any = SimpleNamespace(keys=1, spec=SimpleNamespace(block_size=16))

    def layers(stack: Any, step: Any, kv: Any, sliding: Any) -> GpuArray:
        computed.append(len(step.tokens))
        return GpuArray(0, (len(step.tokens), 8))

    ops: Any = SimpleNamespace(step=lambda *given: given[0], layers=layers)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)

    stack: Any = SimpleNamespace(layers=[])

    def comes(rows: int, times: int = 1) -> list[bool]:
        return [found.run(ops, stack, decoding(rows), kv, {1}) is not None for _ in range(times)]

    assert comes(1, 3) == [False, True, True]
    assert comes(2, 2) == [False, True]
    assert comes(4, 4) == [False, False, False, True]  # twice as often as 2 rows
    assert forgotten == ["of 2"]
    assert comes(1) == [True]
    assert len(found.recorded) == 2


def test_a_recording_that_fails_is_given_back_and_the_reason_is_told() -> None:
    forgotten: list[str] = []
    driver: Any = SimpleNamespace(
        replay=lambda graph: None, forget=forgotten.append, begin_recording=lambda: None,
        end_recording=lambda: "half",
    )  # fmt: skip
    arena: Any = SimpleNamespace(reset=lambda mark=0: None, mark=0)
    found = graphs.Graphs(driver, arena)
    kv: Any = SimpleNamespace(keys=1, spec=SimpleNamespace(block_size=16))
    stack: Any = SimpleNamespace(layers=[])
    full = True

    def layers(stack: Any, step: Any, kv: Any, sliding: Any) -> GpuArray:
        if full:
            raise EngineFault("gpu_memory", "a step needs more")
        return GpuArray(0, (len(step.tokens), 8))

    ops: Any = SimpleNamespace(step=lambda *given: given[0], layers=layers)
    assert found.run(ops, stack, decoding(2), kv, {1}) is None
    with pytest.raises(EngineFault, match="needs more"):
        found.run(ops, stack, decoding(2), kv, {1})
    assert (forgotten, found.recorded) == (["half"], {})
    full = False
    assert found.run(ops, stack, decoding(2), kv, {1}) is not None
    found.release()
    assert (forgotten, found.recorded) == (["half", "half"], {})
    assert found.run(ops, stack, decoding(2), kv, {1}) is None
