"""The engine: a scheduler and an executor that take turns: plan, run, commit.

Owns their order and the times at which they take them, and tells those who watch: the step log, the latency
of each request, the totals of work. Must not know sockets, HTTP, text or any policy: who calls `step` decides
whether it is a server, a script or a test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pageturner.engine.anteroom import Anteroom
from pageturner.engine.bisect_step import StepBisection
from pageturner.engine.ledger_notes import note_begin, note_rows
from pageturner.engine.readiness import Readiness
from pageturner.engine.steps_ahead import AheadExecutor, Begun, StepsAhead
from pageturner.errors import EngineFault
from pageturner.executor.adapters import AdapterStore
from pageturner.executor.grammar import Grammars
from pageturner.executor.runner import Executor
from pageturner.ipc.ledger import Ledger
from pageturner.kv.kv_beside import KVBeside
from pageturner.policies.scheduler_config import CHANGEABLE, SchedulerConfig
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.slo_admission import SloAdmission
from pageturner.request import Event, Failure, Refused, Request, Timings
from pageturner.scheduler.types import Plan, Result
from pageturner.telemetry.latency_breakdown import LatencyTracker, StepTimes
from pageturner.telemetry.step_log import Done, StepLog
from pageturner.telemetry.work import ModelCosts, WorkTotals, work_of
from pageturner.telemetry.work_price import work_prices

ANTEROOM_NAP = (
    0.004  # seconds between two looks at who waits in the anteroom, when nothing else runs
)


class Engine:
    """A scheduler and an executor that take turns. Single-threaded; the caller drives it.

    grammars  compiles those of structured output; without them such requests are refused
    log       where everything that happens is noted, if anywhere
    costs     what a step of this model computes and reads; None where unknown
    adapters  those that requests may ask for; beside: what stands beside its KV
    ahead     the executor again, if it can begin a step before the one before it is known
    """

    def __init__(
        self,
        stack: SchedulerStack,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        log: StepLog | None = None,
        costs: ModelCosts | None = None,
        adapters: AdapterStore | None = None,
        beside: KVBeside | None = None,
        ahead: AheadExecutor | None = None,
    ) -> None:
        self.stack = stack
        self.scheduler = stack.scheduler
        self.executor = executor
        self._bisection = StepBisection()
        self.clock = clock
        self.wake: float | None = None  # when an idle scheduler with work wants to be asked again
        self.latency = LatencyTracker()
        self.work = WorkTotals()  # of all steps, where it is known what they cost
        self._slo = SloAdmission(stack)
        self.adapters = adapters or AdapterStore(None, 0)
        self.beside = beside or KVBeside()
        self.tiers, self._readiness = (
            self.beside.tiers,
            Readiness(grammars, self.adapters, self.beside),
        )
        self._log = log
        self._costs = costs
        self._prices = work_prices(costs) if costs else None
        self._anteroom = Anteroom()
        self.ahead = StepsAhead(ahead) if ahead else None

    @property
    def has_work(self) -> bool:
        return (
            self.scheduler.has_work
            or bool(self._anteroom)
            or self.adapters.busy
            or self.beside.busy
        )

    # -- requests --------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> list[Event]:
        """Take a request. A refusal is an event too: whoever waits for the request is always answered."""
        self.wake = None
        try:
            wait = self._readiness.of(request, len(self._anteroom))
        except Refused as refused:
            return _refused(request, refused)
        if wait is None:
            self.latency.open(request, self.clock())
            return self._add(request)
        self.latency.open(request, self.clock(), wait.part)
        self._anteroom.wait(request, wait.future, wait.check)
        return self._let_in()

    def _let_in(self) -> list[Event]:
        """Hand the scheduler those who can run now."""
        events: list[Event] = []
        for request, refused in self._anteroom.ready():
            if refused is None:
                self.latency.ready(request.id, self.clock())
                events += self._add(request)
            else:
                self.latency.drop(request.id)
                events += _refused(request, refused)
        return events

    def _add(self, request: Request) -> list[Event]:
        now = self.clock()
        if self._prices is not None and (price := self._prices.of_row(request)):
            request = replace(request, row_price=price)
        if self._log is not None:
            self._log.arrived(now, request)
        try:
            self._slo.add(request, now)
        except Refused as refused:
            self.latency.drop(request.id)
            self.adapters.release(request.id)
            if self._log is not None:
                self._log.left(
                    now, request.id
                )  # a replay, which knows no forecasts, may have taken it
            return _refused(request, refused)
        return []

    def abort(self, id: int) -> Timings | None:
        """Forget a request and free its blocks now; unknown ids are those that just finished. Returns where
        its time went until now."""
        self.wake = None
        now = self.clock()
        timings = self.latency.close(id, now)
        self._slo.forget(id)
        self._anteroom.leave(id)
        self.adapters.release(id)
        if self.scheduler.abort(id) and self._log is not None:
            self._log.left(now, id)
        return timings

    def unpin(self, id: int) -> None:
        """Let the blocks go that an ended request kept."""
        if self._log is not None:
            self._log.unpinned(self.clock(), id)
        self.stack.pins.drop(id)

    def release_session(self, name: str) -> None:
        """Nobody will go on with this conversation: whoever waits for its memory may come in."""
        if self._log is not None:
            self._log.released(self.clock(), name)
        self.stack.sessions.release(name)
        self.wake = None

    def forget_prefixes(self) -> None:
        """Let nobody find KV that is only kept because somebody might."""
        if self._log is not None:
            self._log.forgot(self.clock())
        forget = self.stack.pins.forget_others
        self.tiers.forget(forget) if self.tiers else forget()

    def reconfigure(self, wanted: SchedulerConfig, widest: int) -> bool:
        """Go on with other settings. False if that has to wait, see SchedulerStack.reconfigure."""
        if not self.stack.reconfigure(wanted, widest):
            if self.ahead is not None:
                self.ahead.pause()
            return False
        if self._log is not None:
            settings = {name: getattr(wanted, name) for name in CHANGEABLE}
            self._log.changed(self.clock(), settings, widest)
        return True

    # -- steps -----------------------------------------------------------------------------------------------
    def step(self, ledger: Ledger | None = None) -> list[Event]:
        """One turn. Returns the events; sets `wake` when there was nothing to run."""
        self.beside.turn(self)
        events = (self._let_in() if self._anteroom else []) + self._expire()
        if self.ahead is not None and self.ahead.under_way:
            return events + self.ahead.turn(self, ledger)
        start = self.clock()
        plan = self.scheduler.plan(start)
        self.latency.plan(plan)
        self.wake = plan.wake
        if plan.items or plan.ballast:
            return events + self._run(plan, start, ledger)
        return events + self._idle(plan, start, ledger)

    def _expire(self) -> list[Event]:
        """End those whose deadline has passed."""
        now = self.clock()
        events = self._slo.expired(now)
        if self._log is not None:
            for event in events:
                self._log.left(now, event.id)
        return [self._with_timings(event, now) for event in events]

    def _run(self, plan: Plan, start: float, ledger: Ledger | None) -> list[Event]:
        """Compute a plan and make it part of the sequences."""
        begun = self.begin(plan, start)
        if self.ahead is not None and self.ahead.start(begun, ledger):
            return self.ahead.turn(self, ledger)
        note_begin(ledger, begun.planned, plan.items)
        note_rows(ledger, plan.items)
        return self.finish(begun, self.computed(plan, ledger), ledger)

    def begin(self, plan: Plan, start: float) -> Begun:
        """What must be known of a plan before it is computed."""
        computed = [item.start for item in plan.items] if self._log is not None else []
        work = work_of(plan, self._costs.window if self._costs else 0)
        return Begun(plan, start, self.clock(), computed, work)

    def finish(self, begun: Begun, result: Result, ledger: Ledger | None) -> list[Event]:
        """Make what was computed part of the sequences, and tell those who watch."""
        times, plan, start, planned = self.stack.step_times, begun.plan, begun.start, begun.planned
        each = times.each if times.steps else math.inf
        now = self.clock()
        events = self.scheduler.commit(plan, result, now)
        if ledger is not None:
            ledger.finish(now)
        self._slo.saw(events, now)
        if self._log is not None:
            load = self.scheduler.load
            self._log.stepped(
                Done(start, now, plan, begun.computed, result, events, load, begun.work)
            )
        end = self.clock()
        self.latency.step(plan, StepTimes(start, planned, now, end, result.spent, each))
        if self._costs is not None:
            beside = sum(seconds for part, seconds in result.spent.items() if part != "sampling")
            self.work.add(self._costs.demand(begun.work), end - start, now - planned - beside)
        return [self._with_timings(event, end) for event in events]

    def computed(self, plan: Plan, ledger: Ledger | None) -> Result:
        """The result of the plan, or of parts of it where the whole raises."""
        try:
            result = self.executor.run(plan)
        except EngineFault:  # its own word that it cannot go on
            raise
        except Exception as error:
            begin = partial(note_begin, ledger, self.clock())
            return self._bisection.run_parts(self.executor, plan, error, begin)
        self._bisection.in_a_row = 0
        return result

    def _idle(self, plan: Plan, start: float, ledger: Ledger | None) -> list[Event]:
        """There is nothing to run: it waits on purpose, and is not stuck."""
        if self._anteroom or self.adapters.busy or self.beside.busy:
            self.wake = min(plan.wake or math.inf, self.clock() + ANTEROOM_NAP)
        if ledger is not None and self.wake is not None:
            ledger.finish(self.clock())
        if self._log is not None and self.scheduler.has_work:
            self._log.stepped(Done(start, start, plan, [], Result(), [], self.scheduler.load))
        return self.scheduler.commit(plan, Result(), self.clock())

    def _with_timings(self, event: Event, now: float) -> Event:
        """The event, with where the time went if it is the last of its request."""
        if event.finish is None:
            return event
        self.adapters.release(event.id)
        return replace(event, timings=self.latency.close(event.id, now))

    def close(self) -> None:
        """Write what is left of the step log, and of KV."""
        self.beside.close()
        if self._log is not None:
            self._log.close()

    def stats(self) -> dict[str, float]:
        """Of the scheduler, of targets, and of the work; whoever waits in the anteroom is waiting too."""
        figures = self.scheduler.stats() | self._slo.stats()
        figures["deferred"] = float(len(self._anteroom))
        figures["waiting"] += figures["deferred"]
        return figures | self.work.as_dict() | self.adapters.stats()


def _refused(request: Request, refused: Refused) -> list[Event]:
    failure = Failure(refused.code, refused.message, refused.retry_after)
    return [
        Event(id=request.id, index=0, position=len(request.prompt), finish="error", failure=failure)
    ]
