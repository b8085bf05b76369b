"""What ranks say to each other: sums in the order of ranks, whole messages of any size, and an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from pageturner.kernels.comm import PLACE, Communicator, shared_memory
from pageturner.kernels.cpu import native_module

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
T = TypeVar("T")


@pytest.fixture
def three() -> Iterator[list[Communicator]]:
    memory = shared_memory(3)
    yield [Communicator(memory, rank, 3) for rank in range(3)]
    os.close(memory)


def at_once(ranks: list[Communicator], work: Callable[[Communicator], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize("columns", [1, 7, PLACE // 4, PLACE // 4 + 1, PLACE])
def test_sums_are_in_the_order_of_ranks(three: list[Communicator], columns: int) -> None:
    each = np.random.default_rng(0).normal(0, 1e3, (3, 2, columns)).astype(np.float32)
    each[0, 0, 0], each[1, 0, 0], each[2, 0, 0] = 1e8, -1e8, 1  # another order gives 0
    expected = (each[0] + each[1]) + each[2]

    def summed(comm: Communicator) -> np.ndarray:
        x = each[comm.rank].copy()
        for _ in range(3):
            x[:] = each[comm.rank]
            comm.native.sum(x)
        return x

    for x in at_once(three, summed):
        assert x.tobytes() == expected.tobytes()


def test_messages_of_any_size_arrive_whole(three: list[Communicator]) -> None:
    rng = np.random.default_rng(0)
    messages = [
        [],
        [np.arange(5, dtype=np.int32), np.empty(0, np.int32), np.empty((0, 4), np.int32)],
        [rng.integers(0, 1 << 30, (3, PLACE // 4)).astype(np.int32), np.array([[1, 2]], np.int32)],
        [rng.normal(size=(2, 9)).astype(np.float32)],
    ]

    def passed(comm: Communicator) -> list[tuple[int, list[np.ndarray]]]:
        if comm.rank == 0:
            for call, arrays in enumerate(messages):
                comm.send(call, *arrays)
            return []
        return [comm.receive() for _ in messages]

    for got in at_once(three, passed)[1:]:
        for number, (call, arrays) in enumerate(got):
            assert call == number
            assert [one.shape for one in arrays] == [one.shape for one in messages[number]]
            for one, sent in zip(arrays, messages[number], strict=True):
                assert one.tobytes() == sent.tobytes()


@pytest.mark.parametrize("widths", [(3, 1, 5), (PLACE // 4 + 3, 2, PLACE // 2)])
def test_columns_are_gathered_side_by_side(
    three: list[Communicator], widths: tuple[int, ...]
) -> None:
    starts = [0, *np.cumsum(widths).tolist()]
    whole = np.random.default_rng(0).normal(size=(4, starts[-1])).astype(np.float32)

    def gathered(comm: Communicator) -> np.ndarray | None:
        mine = np.ascontiguousarray(whole[:, starts[comm.rank] : starts[comm.rank + 1]])
        out = np.empty_like(whole) if comm.rank == 0 else None
        comm.native.gather(mine, starts, out)
        return out

    out = at_once(three, gathered)[0]
    assert out is not None
    assert out.tobytes() == whole.tobytes()


def test_what_does_not_fit_is_refused_before_anything_is_sent(three: list[Communicator]) -> None:
    first, second, _ = three
    for wrong in ([0, 1, 2], [0, 2, 1, 3], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="gather"):
            first.native.gather(np.zeros((1, 1), np.float32), wrong, np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="only rank 0"):
        second.send(1)
    with pytest.raises(ValueError, match="rank 0 sends"):
        first.receive()


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(three: list[Communicator]) -> None:
    three[0].watch([], patience=0.1)
    with pytest.raises(RuntimeError, match="rank 1 of 3 has not answered for 0 s"):
        three[0].native.sum(np.zeros((1, 1), np.float32))


def test_a_rank_that_ended_is_seen_at_once(three: list[Communicator]) -> None:
    held, alive = [], []
    for _ in range(2):
        read, write = os.pipe()
        alive.append(read)
        held.append(write)
    three[0].watch(alive, patience=60)
    os.close(held[1])
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 of 3 has ended"):
        three[0].native.sum(np.zeros((1, 1), np.float32))
    assert time.monotonic() - begin < 30
    for fd in (held[0], *alive):
        os.close(fd)
