"""The ledger is read at any moment of its writing, and what is read was true at some moment."""

from __future__ import annotations

import multiprocessing
import os
import time

from pageturner.ipc.ledger import Ledger

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


def test_steps_are_noted_while_somebody_watches() -> None:
    engine, fd = Ledger.create()
    page = Ledger(fd)
    assert not engine.watched
    assert page.noted(0) == []
    page.watch(time.monotonic() + 60)
    assert engine.watched
    for number in range(1, 300):
        engine.begin(number / 10, [5, 6])
        engine.note([(5, 700, True), ((1 << 40) - 1, 1, False)])
        if number < 299:
            engine.finish(number / 10 + 0.05)
    steps = page.noted(0)
    assert [step.number for step in steps] == list(range(300 - Ledger.STEPS, 300))
    assert steps[0].rows == [(5, 700, True), ((1 << 40) - 1, 1, False)]
    assert (steps[0].begun, round(steps[0].ended - steps[0].begun, 6)) == (
        steps[0].number / 10,
        0.05,
    )
    assert steps[-1].ended == 0.0, "it runs"
    assert [step.number for step in page.noted(297)] == [298, 299]
    page.watch(0.0)
    assert not engine.watched


def test_more_rows_or_tokens_than_there_is_place_for() -> None:
    ledger, _ = Ledger.create()
    ledger.begin(1.0, [1])
    ledger.note([(i, 1 << 30, True) for i in range(1000)])
    [step] = ledger.noted(0)
    assert len(step.rows) == Ledger.ROWS
    assert step.rows[3] == (3, (1 << 23) - 1, True)


def test_garbage_of_an_engine_is_no_more_than_garbage() -> None:
    ledger, fd = Ledger.create()
    os.pwrite(fd, b"\xff" * 8 * Ledger.WORDS, 0)
    steps = ledger.noted(0)
    assert len(steps) == Ledger.STEPS
    assert all(len(step.rows) == Ledger.ROWS for step in steps)


def test_only_so_many_requests_are_asked_for_and_the_oldest_gives_way() -> None:
    engine, fd = Ledger.create()
    page, now = Ledger(fd), time.monotonic()
    assert engine.asked == []
    page.ask(99, now - 1.0)
    assert engine.asked == [], "that was too long ago"
    for number in range(Ledger.ASKED + 2):
        page.ask(100 + number, now + 60 + number)
    page.ask(105, now + 90)
    assert sorted(engine.asked) == list(range(102, 102 + Ledger.ASKED))
    page.watch(now + 60)
    engine.begin(now, [5])
    engine.note([(5, 1, False)])
    assert [step.number for step in page.noted(0)] == [1]
    assert len(engine.asked) == Ledger.ASKED


def test_the_phase_of_a_start_is_seen_by_the_other_process() -> None:
    ledger, fd = Ledger.create()
    other = Ledger(os.dup(fd))
    assert other.phase == ""
    ledger.begin_phase("load")
    assert other.phase == "load"
    ledger.begin_phase("first_step")
    assert other.phase == "first_st"
