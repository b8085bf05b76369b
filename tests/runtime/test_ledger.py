"""The ledger is read at any moment of its writing, and what is read was true at some moment."""

from __future__ import annotations

import multiprocessing
import time

from pageturner.ledger import Ledger

READS = 120_000


def _steps(fd: int) -> None:
    ledger = Ledger(fd)
    while True:
        ledger.begin(time.monotonic(), [7, 8])
        ledger.finish(time.monotonic())


def test_a_reader_never_sees_half_of_what_is_written() -> None:
    since = time.monotonic()
    ledger, fd = Ledger.create()
    ledger.begin(since, [7, 8])
    ledger.finish(since)
    writer = multiprocessing.get_context("fork").Process(target=_steps, args=(fd,), daemon=True)
    writer.start()
    try:
        while ledger.read()[0] < 100:
            assert writer.is_alive()
        torn, last = [], 0
        for _ in range(READS):
            begun, finished, begun_at, finished_at, ids = ledger.read()
            if begun < last or min(finished_at, begun_at) < since or ids != [7, 8]:
                torn.append((begun, finished, begun_at, finished_at, ids))
            last = begun
    finally:
        writer.kill()
        writer.join()
    assert torn == []
