"""Runs that answer the questions of a search: in this process, or in several processes ahead of it.

Owns the processes, which are spawned, and the questions that they look at while an answer is
awaited. Must not know what a search decides: it asks the same questions in the same order whoever
answers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any

from pageturner.lab.planning.capacity_search import (
    Ahead,
    CapacityQuestion,
    Option,
    in_words,
)
from pageturner.lab.traffic.traffic import Traffic
from pageturner.progress import Still

SLOTS = 4096  # runs that can be cancelled; a search takes a few dozen


class SerialRuns:
    """This process, one run after another."""

    def __init__(self, options: Sequence[Option], *, progress: bool | None = None) -> None:
        self._options = options
        self._progress = progress
        self._made: dict[float, Traffic] = {}

    def run(
        self,
        question: CapacityQuestion,
        ahead: Ahead | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Scenario.run, given up when it is hopeless."""
        one = self._options[question.option].with_replicas(question.replicas)
        if one.rate not in self._made:
            self._made[one.rate] = one.traffic(one.rate)
        traffic = self._made[one.rate]
        return one.run(progress=self._progress, give_up=True, traffic=traffic, cancelled=cancelled)


class ParallelRuns:
    """Several processes: while one answer is awaited, the others look at what may be asked behind
    it. Where no process can be had it goes on alone, and says so.

    tell  gets a line now and then
    """

    def __init__(
        self, options: Sequence[Option], workers: int, tell: Callable[[str], None]
    ) -> None:
        self._options, self._workers, self._tell = options, workers, tell
        context = multiprocessing.get_context("spawn")
        self._flags = context.RawArray("b", SLOTS)
        self._pool: ProcessPoolExecutor | None = ProcessPoolExecutor(
            workers, context, initializer=_begin, initargs=(list(options), self._flags)
        )
        self._futures: dict[CapacityQuestion, tuple[int, Future[dict[str, Any]]]] = {}
        self._slots = 0
        self._alone = SerialRuns(options)

    def __enter__(self) -> ParallelRuns:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, question: CapacityQuestion, ahead: Ahead) -> dict[str, Any]:
        """Answer as SerialRuns.run does."""
        if self._pool is not None:
            try:
                self._look_ahead(ahead(2 * self._workers))
                return self._await(question)
            except (OSError, BrokenProcessPool) as error:
                self._tell(f"going on in one process: {error}")
                self._end()
        return self._alone.run(question)

    def _look_ahead(self, wanted: list[CapacityQuestion]) -> None:
        """Begin these, as many as there are processes, and end what nobody wants any more."""
        assert self._pool is not None
        for question in [one for one in self._futures if one not in wanted]:
            slot, future = self._futures.pop(question)
            self._flags[slot] = 1
            future.cancel()
        for question in wanted[: self._workers]:
            if question not in self._futures and self._slots < SLOTS:
                self._futures[question] = (
                    self._slots,
                    self._pool.submit(_run, question, self._slots),
                )
                self._slots += 1

    def _await(self, question: CapacityQuestion) -> dict[str, Any]:
        _, future = self._futures[question]
        trying = in_words(self._options[question.option], question)
        with Still(lambda: f"{trying}: being tried"):
            found = future.result()
        del self._futures[question]
        return found

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        self._flags[:] = [1] * SLOTS
        self._futures.clear()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


# -- in a process ----------------------------------------------------------------------------------


class _Here:
    """The state that a process was begun with."""

    runs: SerialRuns
    flags: Any


def _begin(options: list[Option], flags: Any) -> None:
    # the process that asks gets it too, and ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # few of a simulation's objects refer to themselves, and it has millions
    gc.set_threshold(200_000, 50, 100)
    _Here.runs, _Here.flags = SerialRuns(options, progress=False), flags
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(question: CapacityQuestion, slot: int) -> dict[str, Any]:
    return _Here.runs.run(question, cancelled=lambda: bool(_Here.flags[slot]))
