"""The engine: a scheduler and an executor that take turns: plan, run, commit.

Owns nothing but their order. Must not know sockets, HTTP, text or any policy: who calls `step` decides
whether it is a server, a script or a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pageturner.channel import Ledger
from pageturner.core.scheduler import Scheduler
from pageturner.core.types import Event, Failure, Refused, Request, Result
from pageturner.runtime.runner import Executor


class Engine:
    """A scheduler and an executor that take turns. Single-threaded; the caller drives it."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.wake: float | None = None  # when an idle scheduler with work wants to be asked again

    def submit(self, request: Request) -> list[Event]:
        """Take a request. A refusal is an event too: whoever waits for the request is always answered."""
        self.wake = None
        try:
            self.scheduler.add(request)
        except Refused as refused:
            failure = Failure(refused.code, refused.message)
            return [Event(request.id, 0, len(request.prompt), finish="error", failure=failure)]
        return []

    def abort(self, id: int) -> None:
        """Forget a request and free its blocks now; unknown ids are those that just finished."""
        self.wake = None
        self.scheduler.abort(id)

    def step(self, ledger: Ledger | None = None) -> list[Event]:
        """One turn. Returns the news; sets `wake` when there was nothing to run."""
        plan = self.scheduler.plan(self.clock())
        self.wake = plan.wake
        if not plan.items and not plan.ballast:
            if ledger is not None and plan.wake is not None:
                ledger.finish(self.clock())  # it waits on purpose, and is not stuck
            return self.scheduler.commit(plan, Result(), self.clock())
        if ledger is not None:
            ledger.begin(self.clock(), [item.sequence.request.id for item in plan.items])
        result = self.executor.run(plan)
        now = self.clock()
        events = self.scheduler.commit(plan, result, now)
        if ledger is not None:
            ledger.finish(now)
        return events
