"""Which sizes of steps are recorded: what comes twice, at most so many, those that are used most, and nothing
that does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch
from pageturner.kernels.gpu import graphs
from pageturner.kernels.gpu.arrays import GpuArray

STACK: Any = SimpleNamespace(layers=[])
KV: Any = SimpleNamespace(keys=1, spec=SimpleNamespace(block_size=16))


def decoding(rows: int, context: int = 1) -> Batch:
    ones = np.ones(rows, np.int32)
    starts = np.arange(rows + 1, dtype=np.int32)
    table = np.zeros((rows, -(-context // 16)), np.int32)
    return Batch(ones, ones * context - 1, starts, ones * context, table, ones, starts[:-1])


class Device:
    """A driver, an arena and operations that compute nothing. full: what does not fit now."""

    def __init__(self) -> None:
        self.full = ""
        self.computed: list[int] = []
        self.forgotten: list[str] = []
        self.begun = 0
        self.architecture = 90
        self.graphs = graphs.Graphs(self, SimpleNamespace(reset=lambda mark=0: None, mark=0))  # type: ignore[arg-type]

    def fail(self, what: str) -> None:
        if self.full == what:
            raise EngineFault("gpu_memory", f"{what} does not fit")

    def begin_recording(self) -> None:
        pass

    def end_recording(self) -> str:
        self.fail("instantiation")
        return f"of {self.computed[-1]}" if self.computed else "half"

    def replay(self, graph: str) -> None:
        self.fail("replay")

    def forget(self, graph: str) -> None:
        self.forgotten.append(graph)

    def begin(self) -> None:
        self.begun += 1

    def steps(self, pages: Any, *_: Any) -> Any:
        self.fail("upload")
        return pages

    def layers(self, stack: Any, steps: Any) -> GpuArray:
        self.fail("layers")
        self.computed.append(len(steps[0][0].tokens))
        return GpuArray(0, (self.computed[-1], 8))

    def comes(self, rows: int, times: int = 1, context: int = 1) -> list[bool]:
        """Whether a step of this size is recorded or replayed, each time."""
        batch = decoding(rows, context)
        found = [self.graphs.run(self, STACK, [(batch, KV)], [set()]) for _ in range(times)]  # type: ignore[arg-type]
        return [one is not None for one in found]


@pytest.fixture
def device() -> Device:
    return Device()


def test_the_sizes_that_are_used_most_have_the_recordings(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    assert device.comes(1, 3) == [False, True, True]
    assert device.comes(2, 2) == [False, True]
    assert device.comes(4, 4) == [False, False, False, True]  # twice as often as 2 rows
    assert device.forgotten == ["of 2"]
    assert device.comes(1) == [True]
    assert len(device.graphs.recorded) == 2


def test_a_recording_that_fails_otherwise_is_given_back_and_the_reason_is_told(
    device: Device,
) -> None:
    assert device.comes(2) == [False]

    def broken(*_: Any) -> GpuArray:
        raise EngineFault("gpu_fault", "a launch failed")

    device.layers = broken  # type: ignore[method-assign]
    with pytest.raises(EngineFault) as told:
        device.comes(2)
    assert told.value.code == "gpu_fault"
    assert (device.forgotten, device.graphs.recorded) == (["half"], {})
    del device.layers
    assert device.comes(2) == [True]
    device.graphs.release()
    assert (device.forgotten, device.graphs.recorded) == (["half", "of 2"], {})
    assert device.comes(2) == [False]


@pytest.mark.parametrize("what", ["upload", "layers", "instantiation", "replay"])
def test_what_does_not_fit_runs_without_a_recording_from_then_on(device: Device, what: str) -> None:
    assert device.comes(2) == [False]
    device.full = what
    assert device.comes(2) == [False]  # computed plainly: nobody is told
    assert device.begun == 1  # in an arena that is empty again
    device.full = ""
    assert device.comes(2, 100) == [False] * 100
    assert device.begun == 1
    assert device.graphs.recorded == {}
    assert device.comes(4, 2) == [False, True]  # another size fits


def test_a_recording_that_does_not_fit_any_more_is_given_back(device: Device) -> None:
    assert device.comes(2, 2) == [False, True]
    device.full = "replay"
    assert device.comes(2) == [False]
    assert (device.forgotten, device.graphs.recorded) == (["of 2"], {})


def test_what_did_not_fit_is_tried_again_some_day(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "NEVER", -16)
    monkeypatch.setattr(graphs, "LIFE", 4)
    device.comes(2)
    device.full = "layers"
    assert device.comes(2) == [False]
    device.full = ""
    assert device.comes(2, 40)[::39] == [False, True]


def test_uses_of_long_ago_are_forgotten(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LIFE", 8)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    device.comes(1, 1000)
    assert device.comes(2, 40)[-1]  # though it came less often than the other one in all
    device.full = "layers"
    for context in range(1, 200):
        device.comes(8, context=256 * 8 * context)
    assert len(device.graphs._uses) <= 2 * graphs.LIFE


def test_contexts_of_one_size_share_a_recording(device: Device) -> None:
    assert device.comes(4, 2, context=700) == [False, True]  # 12 segments, in a room of 16
    assert device.comes(4, 1, context=1000) == [True]
    assert len(device.graphs.recorded) == 1
    assert device.comes(4, 1, context=1100) == [True]  # they have grown beyond it
    assert len(device.graphs.recorded) == 2


def test_a_recording_with_more_room_does_until_there_is_one(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    assert device.comes(4, 12, context=1500)[-1]
    assert device.comes(4, 20, context=700) == [True] * 20  # 12 segments in a room of 24
    assert device.forgotten == []  # it was not used twice as often
    assert device.comes(4, 1, context=200) == [False]  # a room of 8 would do
