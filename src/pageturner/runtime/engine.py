"""The engine: a scheduler and an executor that take turns: plan, run, commit.

Owns their order, the times at which they take them, and the requests whose grammar is still being compiled:
the scheduler gets them when they can run. Must not know sockets, HTTP, text or any policy: who calls `step`
decides whether it is a server, a script or a test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pageturner.channel import Ledger
from pageturner.core.scheduler import Scheduler
from pageturner.core.types import Event, Failure, Refused, Request, Result, Timings
from pageturner.observe.latency_breakdown import LatencyTracker, StepTimes
from pageturner.observe.step_log import Done, StepLog
from pageturner.observe.work import WorkTotals
from pageturner.policies.slo_admission import SloAdmission
from pageturner.runtime.grammar import GrammarError, Grammars, Start
from pageturner.runtime.runner import Executor

COMPILE_NAP = 0.004  # seconds between two looks at grammars that are being compiled, when nothing else runs


class Engine:
    """A scheduler and an executor that take turns. Single-threaded; the caller drives it.

    grammars  compiles those of structured output; without them such requests are refused
    log       where everything that happens is noted, if anywhere
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        log: StepLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.wake: float | None = None  # when an idle scheduler with work wants to be asked again
        self._grammars = grammars
        self._log = log
        self.accounts = LatencyTracker()
        self.usage = WorkTotals()  # of the steps of which the executor says what they demand
        self.targets = SloAdmission(scheduler)
        self._compiling: dict[int, tuple[Request, Future[Start]]] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling)

    def submit(self, request: Request) -> list[Event]:
        """Take a request. A refusal is an event too: whoever waits for the request is always answered."""
        self.wake = None
        grammar = request.params.structured_outputs
        if grammar is None:
            self.accounts.open(request, self.clock())
            return self._add(request)
        if self._grammars is None:
            return _refused(request, "structured_outputs_unsupported", "this engine has no vocabulary")
        if len(self._compiling) >= self._grammars.most_waiting and not request.resume:
            waiting = len(self._compiling)
            return _refused(request, "queue_full", f"{waiting} requests are waiting for their grammars")
        self.accounts.open(request, self.clock(), "grammar_wait")
        self._compiling[request.id] = request, self._grammars.compiled(grammar)
        return self._let_in()

    def _add(self, request: Request) -> list[Event]:
        now = self.clock()
        if self._log is not None:
            self._log.arrived(now, request)
        try:
            self.targets.add(request, now)
        except Refused as refused:
            self.accounts.drop(request.id)
            if self._log is not None:
                self._log.left(now, request.id)  # a replay, which knows no forecasts, may have taken it
            return _refused(request, refused.code, refused.message, refused.retry_after)
        return []

    def _let_in(self) -> list[Event]:
        """Hand the scheduler those whose grammars are there."""
        events: list[Event] = []
        for id, (request, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[id]
            try:
                least, most = compiled.result().least, request.params.max_tokens
            except GrammarError as error:
                self.accounts.drop(id)
                events += _refused(request, "invalid_grammar", str(error))
                continue
            if most is not None and most < least:
                message = f"every answer to this grammar has {least} tokens or more, and max_tokens is {most}"
                events += _refused(request, "grammar_too_long", message + ": raise it")
            else:
                self.accounts.compiled(id, self.clock())
                events += self._add(request)
        return events

    def abort(self, id: int) -> Timings | None:
        """Forget a request and free its blocks now. Returns where its time went, or None for an unknown id:
        that of a request that has just finished."""
        self.wake = None
        timings = self.accounts.close(id, self.clock())
        self.targets.forget(id)
        _, compiled = self._compiling.pop(id, (None, None))
        if compiled is not None and all(compiled is not other for _, other in self._compiling.values()):
            compiled.cancel()  # if it has not begun
        if self.scheduler.abort(id) and self._log is not None:
            self._log.left(self.clock(), id)
        return timings

    def unpin(self, id: int) -> None:
        """Let the blocks go that an ended request kept."""
        if self._log is not None:
            self._log.unpinned(self.clock(), id)
        self.scheduler.pins.drop(id)

    def changed(self, settings: dict[str, Any], widest: int) -> None:
        """The scheduler was given other settings: for whoever replays the log."""
        if self._log is not None:
            self._log.changed(self.clock(), settings, widest)

    def step(self, ledger: Ledger | None = None) -> list[Event]:
        """One turn. Returns the news; sets `wake` when there was nothing to run."""
        news = self._let_in() if self._compiling else []
        return news + self._expire() + self._turn(ledger)

    def _expire(self) -> list[Event]:
        """End those whose deadline has passed."""
        now = self.clock()
        events = self.targets.expired(now)
        if self._log is not None:
            for event in events:
                self._log.left(now, event.id)
        return [self._told(event, now) for event in events]

    def _turn(self, ledger: Ledger | None) -> list[Event]:
        start = self.clock()
        plan = self.scheduler.plan(start)
        self.accounts.plan(plan)
        computed = [item.sequence.computed for item in plan.items] if self._log is not None else []
        self.wake = plan.wake
        if not plan.items and not plan.ballast:
            if self._compiling:
                self.wake = min(plan.wake or math.inf, self.clock() + COMPILE_NAP)
            if ledger is not None and self.wake is not None:
                ledger.finish(self.clock())  # it waits on purpose, and is not stuck
            if self._log is not None and self.scheduler.has_work:
                self._log.stepped(Done(start, start, plan, [], Result(), [], self.scheduler.load))
            return self.scheduler.commit(plan, Result(), self.clock())
        pace, planned = self.scheduler.pace, self.clock()
        each = pace.each if pace.steps else math.inf
        if ledger is not None:
            ledger.begin(planned, [item.sequence.request.id for item in plan.items])
        result = self.executor.run(plan)
        now = self.clock()
        events = self.scheduler.commit(plan, result, now)
        self.targets.saw(events, now)
        if self._log is not None:
            self._log.stepped(Done(start, now, plan, computed, result, events, self.scheduler.load))
        if ledger is not None:
            ledger.finish(now)
        end = self.clock()
        self.accounts.step(plan, StepTimes(start, planned, now, end, result.spent, each))
        if result.demand is not None:
            beside = sum(seconds for part, seconds in result.spent.items() if part != "sampling")
            self.usage.add(result.demand, end - start, now - planned - beside)
        return [self._told(event, end) for event in events]

    def _told(self, event: Event, now: float) -> Event:
        """The news, with where the time went if it is the last of its request."""
        return event if event.finish is None else replace(event, timings=self.accounts.close(event.id, now))

    def close(self) -> None:
        """Write what is left of the step log."""
        if self._log is not None:
            self._log.close()

    def stats(self) -> dict[str, float]:
        """Of the scheduler, of targets, and what was used; whoever waits for a grammar is waiting too."""
        figures = self.scheduler.stats() | self.targets.stats()
        figures["waiting"] += len(self._compiling)
        return figures | self.usage.as_dict()


def _refused(request: Request, code: str, message: str, retry_after: float = 0.0) -> list[Event]:
    failure = Failure(code, message, retry_after)
    return [Event(request.id, 0, len(request.prompt), finish="error", failure=failure)]
