"""Garbage is collected at moments of our choosing, for a small share of the time."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from pageturner.garbage import LEAST, SHARE, WORTH, Collector
from pageturner.http import lifecycle

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """Python collects nothing by itself while one of these tests runs, and as before behind it."""
    before = gc.get_threshold()
    gc.disable()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.enable()
    gc.collect()


class Slow:
    """A clock, and a collection that takes `seconds` of it."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.count = 0.0, seconds, 0

    def collect(self) -> None:
        self.count += 1
        self.now += self.seconds


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.parametrize("seconds", [0.001, 0.03, 0.1])
def test_collections_take_their_share_of_the_time_and_no_more(seconds: float) -> None:
    slow = Slow(seconds)
    collector = Collector(slow.collect, lambda: slow.now)
    made = [[] for _ in range(2 * WORTH)]  # there is always something to look at
    while slow.now < 1000.0:
        slow.now += 0.1
        collector.look()
    expected = 1000.0 / max(LEAST, seconds / SHARE)
    assert 0.7 * expected <= slow.count <= expected + 1
    assert made


def test_nothing_is_collected_where_hardly_anything_was_made() -> None:
    gc.collect()
    slow = Slow(0.0)
    collector = Collector(slow.collect, lambda: slow.now)
    slow.now = 10.0
    collector.look()
    assert slow.count == 0
    made = [[] for _ in range(2 * WORTH)]
    collector.look()
    assert slow.count == 1
    assert made


def test_a_step_of_many_sequences_walks_no_old_objects() -> None:
    """Their events, all alive at once, are fewer than what makes Python look."""
    gc.enable()
    walks: list[int] = []
    gc.callbacks.append(lambda phase, info: walks.append(info["generation"]))
    try:
        Collector().take_over()
        for _ in range(50):
            step = [(i, (i,), [i], {"i": i}) for i in range(1000)]
            del step
    finally:
        gc.callbacks.pop()
    assert not walks


def test_the_event_loop_has_garbage_collected() -> None:
    async def main() -> bool:
        collecting = asyncio.ensure_future(lifecycle.collect_garbage(Collector()))
        await asyncio.sleep(0)
        knots = [Knot() for _ in range(2 * WORTH)]
        seen = weakref.ref(knots[0])
        del knots
        async with asyncio.timeout(20):
            while seen() is not None:
                await asyncio.sleep(0.02)
        collecting.cancel()
        return seen() is None

    assert asyncio.run(main())


@pytest.mark.slow
def test_an_engine_that_ends_reports_nothing_as_leaked() -> None:
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "serve",
        str(GOLDEN),
        "--port",
        "0",
        "--backend",
        "native",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "listening on" not in (line := process.stderr.readline()):
            assert line, "the server did not start"
        process.terminate()
        assert "leaked" not in process.stderr.read()
