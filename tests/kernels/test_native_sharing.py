"""How attention is divided: whatever the lengths, no thread has much more to do than the others."""

from __future__ import annotations

import heapq

import pytest
from grid import batch, kv_spec

from pageturner.kernels import _native
from pageturner.kernels.cpu import native_views
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")

BATCHES = {
    "one long, many short": [(32_000, 1)] + [(250, 1)] * 63,
    "many equal": [(250, 1)] * 256,
    "one long prompt": [(0, 2048)],
    "one chunk behind a long prefix": [(16_000, 512)],
    "chunks and decodes": [(512, 448)] + [(100 + 40 * i, 1) for i in range(64)],
    "one alone": [(60_000, 1)],
}


def shares(
    runs: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    window: int,
    threads: int,
    sharing: int = 0,
) -> list[int]:
    """`sharing` sequences after the first one have its blocks."""
    blocks = sum(-(-(c + n) // 256) for c, n in runs) + 1
    kv = NativeOps(1).alloc_kv(kv_spec(256, blocks, kv_heads, 8, "int8"))
    b = batch(runs, 256, blocks)
    b.block_table[1 : 1 + sharing] = b.block_table[0]
    view = native_views.batch_view(b)
    return list(_native.attention_shares(kv, view, heads, window, threads))


def busiest(work: list[int], threads: int) -> int:
    """Of threads that take the next share whenever they are free: when the last one ends."""
    ends = [0] * threads
    for each in work:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


@pytest.mark.parametrize("threads", [2, 3, 8, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(9, 3, 0), (14, 2, 0), (12, 12, 0), (4, 1, 512)]
)
@pytest.mark.parametrize("name", BATCHES)
def test_the_busiest_thread_is_near_the_mean(
    name: str, heads: int, kv_heads: int, window: int, threads: int
) -> None:
    """At most a fifth above it, or one item of one segment where there are too few of them."""
    work = shares(BATCHES[name], heads, kv_heads, window, threads)
    mean = sum(work) / threads
    assert busiest(work, threads) <= max(1.2 * mean, mean + max(work))
    assert max(work) <= max(mean / 6, (256 + 32) * max(1, 48 // (heads // kv_heads)))


def test_one_thread_takes_all_at_once() -> None:
    assert len(shares(BATCHES["one long, many short"], 9, 3, 0, 1)) == 1


def test_all_work_is_shared_out() -> None:
    """Rows times (tokens seen + 32 for each item): nothing is lost where items are cut into segments."""
    runs = [(1000, 1), (10, 1)]
    whole = sum(shares(runs, 3, 1, 0, 1))
    assert whole == (1001 + 32) + (11 + 32)
    assert sum(shares(runs, 3, 1, 0, 64)) == whole + 3 * 32  # the long one is four items


def test_shared_beginnings_are_one_item() -> None:
    """Four answers to a prompt of two segments: its 512 tokens are begun once, then each has 49 of its own.
    The fifth has other blocks, the sixth too few whole segments."""
    runs = [(560, 1)] * 4
    assert sum(shares(runs, 3, 1, 0, 1, 3)) == 4 * (512 + 32) + 4 * (49 + 32)
    assert (
        sum(shares([*runs, (560, 1)], 3, 1, 0, 1, 3)) == 4 * (512 + 32) + 4 * (49 + 32) + 561 + 32
    )
    assert (
        sum(shares([*runs, (254, 1)], 3, 1, 0, 1, 4)) == 4 * (512 + 32) + 4 * (49 + 32) + 255 + 32
    )
