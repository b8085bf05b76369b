"""The choice of tokens on a device: the reference's tokens and logprobs, and only the logits of rows that ask
for logprobs reach the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.base import Ops, Tensor
from pageturner.kernels.choosing import ChooseArgs, Draw, Head, LogprobsWanted, SamplerOutput
from pageturner.kernels.edits import Edit, Operation
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.reference import ReferenceOps

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

pytestmark = pytest.mark.timeout(300)
ROWS, WIDTH, VOCABULARY = 6, 64, 320


class Counting(fake_gpu.FakeDriver):  # type: ignore[misc, name-defined]
    """Tells the bytes of each download."""

    def __init__(self) -> None:
        super().__init__()
        self.downloads: list[int] = []

    def download(self, array: NDArray[Any], address: int) -> None:
        self.downloads.append(array.nbytes)
        super().download(array, address)


def chosen(ops: Ops, wanted: LogprobsWanted | None) -> SamplerOutput:
    """Of the same hidden rows on each backend: with every kind of edit, with masks, greedy and drawn."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    x = rng.standard_normal((ROWS, WIDTH), np.float32)
    head = Head(
        ops.pack_weight(Tensor("norm", "F32", (WIDTH,), np.ones(WIDTH, np.float32).view(np.uint8))),
        1e-5,
        ops.pack_weight(Tensor("head", "F32", weight.shape, weight.view(np.uint8).reshape(-1))),
    )
    seen = [3, 9, 9, 70, 211]
    edits = [
        [Edit(Operation.REPETITION, seen, 1.3), Edit(Operation.FREQUENCY, seen, 0.4)],
        [Edit(Operation.PRESENCE, seen, 0.7), Edit(Operation.ALLOW, list(range(40, 90)))],
        [],
        [Edit(Operation.ADD, [7, 9, 7], [2.0, -1.0, 0.5])],
        [Edit(Operation.FORBID, list(range(300)))],
        [Edit(Operation.FORCE, [17], 1.0)],
    ]
    allowed = np.full((ROWS, VOCABULARY // 64), ~np.uint64(0))
    allowed[3] = np.uint64(0x0F0F)
    draw: Draw = (
        np.array([0, 0.8, 1.2, 0, 0.5, 0], np.float32),
        np.array([0, 0, 40, 0, 5, 0], np.int32),
        np.array([1, 0.9, 0.8, 1, 1, 1], np.float32),
        np.zeros(ROWS, np.float32),
        np.array([0, 0.3, 0.71, 0, 0.93, 0], np.float32),
    )
    rows: Any = x
    if isinstance(ops, GpuOps):
        ops.begin()
        rows = ops.on_device(x)
    return ops.choose(rows, head, ChooseArgs(draw, allowed, edits, wanted))


@pytest.mark.parametrize(
    ("top", "candidates"),
    [
        ([-1, 2, -1, -1, 0, -1], [0, 0, 0, 0, 0, 0]),
        ([-1, -1, -1, 3, -1, 1], [0, 0, 4, 2, 0, 0]),
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        ([-1, -1, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_only_rows_that_ask_for_logprobs_reach_the_host(
    top: list[int], candidates: list[int]
) -> None:
    wanted = LogprobsWanted(np.array(top, np.int32), np.array(candidates, np.int32))
    driver = Counting()
    ops = GpuOps(driver, 8 << 20, graphs=False)
    got, expected = chosen(ops, wanted), chosen(ReferenceOps(), wanted)
    asking = [row for row in range(ROWS) if top[row] >= 0 or candidates[row] > 0]
    tokens = 2 * 4 * ROWS  # ids and their logits, of every row
    assert sum(driver.downloads) == tokens + 4 * VOCABULARY * len(asking)

    assert got.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(got.logits, expected.logits, rtol=1e-5, atol=1e-4)
    assert got.logprobs is not None
    assert expected.logprobs is not None
    for row in asking:
        np.testing.assert_allclose(got.logprobs.lse[row], expected.logprobs.lse[row], rtol=1e-5)
        np.testing.assert_allclose(
            got.logprobs.chosen[row], expected.logprobs.chosen[row], atol=1e-4
        )
        for mine, theirs, count in (
            (got.logprobs.top, expected.logprobs.top, max(top[row], 0)),
            (got.logprobs.candidates, expected.logprobs.candidates, candidates[row]),
        ):
            assert mine[0][row, :count].tolist() == theirs[0][row, :count].tolist()
            np.testing.assert_allclose(mine[1][row, :count], theirs[1][row, :count], atol=1e-4)


def test_no_logits_leave_the_device_where_nobody_asks() -> None:
    driver = Counting()
    got, expected = (
        chosen(GpuOps(driver, 8 << 20, graphs=False), None),
        chosen(ReferenceOps(), None),
    )
    assert driver.downloads == [2 * 4 * ROWS]
    assert {"edit", "forbid", "sample.draw"} <= set(driver.launched)
    assert got.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(got.logits, expected.logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [48 << 10, 60 << 10, 100 << 10])
def test_a_few_rows_at_a_time_where_the_arena_has_no_room_for_all(size: int) -> None:
    wanted = LogprobsWanted(
        np.array([-1, 2, -1, 1, 0, 3], np.int32), np.array([0, 0, 4, 0, 0, 0], np.int32)
    )
    driver = Counting()
    got = chosen(GpuOps(driver, size, graphs=False), wanted)
    whole = chosen(GpuOps(fake_gpu.FakeDriver(), 8 << 20, graphs=False), wanted)
    assert driver.launched.count("sample.draw") > 1
    assert got.ids.tobytes() == whole.ids.tobytes()
    assert got.logits.tobytes() == whole.logits.tobytes()
    assert got.logprobs is not None
    assert whole.logprobs is not None
    for mine, theirs in zip(
        (got.logprobs.lse, got.logprobs.chosen, *got.logprobs.top, *got.logprobs.candidates),
        (
            whole.logprobs.lse,
            whole.logprobs.chosen,
            *whole.logprobs.top,
            *whole.logprobs.candidates,
        ),
        strict=True,
    ):
        assert mine.tobytes() == theirs.tobytes()


def test_no_room_for_a_single_row_is_an_error() -> None:
    with pytest.raises(EngineFault) as raised:
        chosen(GpuOps(Counting(), 3 << 10, graphs=False), None)
    assert raised.value.code == "gpu_memory"
