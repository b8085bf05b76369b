"""The threads of the native backend: any number of them, pinned or not, gives the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from grid import normal, weight

from pageturner.config.settings import EngineConfig
from pageturner.engine.backends import make_ops
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    ops = NativeOps(1)
    return np.asarray(ops.linear(normal(9, 96), ops.pack_weight(weight("Q4_1", 700, 96))))


@pytest.mark.parametrize("threads", [2, 3, 7, 16, 64])
def test_any_number_of_threads_gives_the_same(threads: int, expected: np.ndarray) -> None:
    """More threads than cores, too: nobody waits for one that is not there."""
    ops = NativeOps(threads)
    packed = ops.pack_weight(weight("Q4_1", 700, 96))
    for _ in range(50):
        assert np.array_equal(ops.linear(normal(9, 96), packed), expected)


def threads_here() -> set[int]:
    return {int(t.name) for t in Path("/proc/self/task").iterdir()}


def test_pinned_threads_give_the_same_and_leave_the_caller_free(expected: np.ndarray) -> None:
    mine, before = os.sched_getaffinity(0), threads_here()
    ops = make_ops(EngineConfig(backend="native", threads=4, pin_threads=True))
    assert isinstance(ops, NativeOps)
    assert os.sched_getaffinity(0) == mine
    helpers, cores = sorted(threads_here() - before), sorted(mine)
    assert [os.sched_getaffinity(t) for t in helpers] == [
        {cores[i % len(cores)]} for i in (1, 2, 3)
    ]
    assert np.array_equal(
        ops.linear(normal(9, 96), ops.pack_weight(weight("Q4_1", 700, 96))), expected
    )


def test_a_core_that_is_not_there_is_refused() -> None:
    engine = NativeOps(2)._engine
    with pytest.raises(ValueError, match="no such core"):
        engine.pin_threads([-1])
    with pytest.raises(RuntimeError, match="cannot pin"):
        engine.pin_threads([1000])
