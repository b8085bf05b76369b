"""The engine: a scheduler and an executor in turn: plan, run, commit.

Owns the order and the times of these calls, which steps are in flight, and the observers: the step
log, the latency of each request, the totals of work. Must not know sockets, HTTP, text or any
policy: the caller of `step` decides whether it is a server, a script or a test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pageturner.engine.async_step import AsyncExecutor, AsyncSteps, InFlightStep
from pageturner.engine.bisect_step import StepBisection, part_of
from pageturner.engine.pending_requests import PendingRequests
from pageturner.errors import EngineFault
from pageturner.executor.adapters import AdapterStore
from pageturner.executor.grammar import Grammars
from pageturner.executor.runner import Executor
from pageturner.ipc.ledger import Ledger
from pageturner.kv.kv_connectors import KVConnectors
from pageturner.policies.scheduler_config import CHANGEABLE, SchedulerConfig
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.slo_admission import SloAdmission
from pageturner.request import Event, Failure, Refused, Request, Timings
from pageturner.scheduler.types import Item, Output, Plan, Result, State
from pageturner.telemetry.latency_breakdown import LatencyTracker, StepTimes
from pageturner.telemetry.step_log import Done, StepLog
from pageturner.telemetry.work import ModelCosts, WorkTotals, work_of
from pageturner.telemetry.work_price import work_prices

PENDING_NAP = 0.004  # seconds between two looks at pending requests when nothing else runs


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts that an engine may have besides its scheduler and its executor.

    grammars  compiles grammars of structured output; None: such requests are refused
    log       the step log, in which everything that happens is noted
    costs     what a step of this model computes and reads; None where unknown
    adapters  the adapters that requests may ask for
    beside    what is connected to the KV: tiers, events, engines that prefill
    async_executor  the executor again, if it can begin a step before the one before it is known
    """

    grammars: Grammars | None = None
    log: StepLog | None = None
    costs: ModelCosts | None = None
    adapters: AdapterStore | None = None
    connectors: KVConnectors | None = None
    async_executor: AsyncExecutor | None = None


class Engine:
    """A scheduler and an executor in turn. Single-threaded; the caller drives it."""

    def __init__(
        self,
        stack: SchedulerStack,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        parts: EngineParts | None = None,
    ) -> None:
        parts = parts or EngineParts()
        self.stack = stack
        self.scheduler = stack.scheduler
        self.executor = executor
        self._bisection = StepBisection()
        self.clock = clock
        self.ledger: Ledger | None = None  # in which each step is noted, where somebody looks at it
        self.wake: float | None = None  # when an idle scheduler with work wants to be asked again
        self.latency = LatencyTracker()
        self.work = WorkTotals()  # of all steps, where it is known what they cost
        self._slo = SloAdmission(stack)
        self.adapters = parts.adapters or AdapterStore(None, 0)
        self.connectors = parts.connectors or KVConnectors()
        self._pending = PendingRequests(parts.grammars, self.adapters, self.connectors)
        self.prepare = self._pending.prepare  # to be called while nobody waits
        self._log = parts.log
        self._costs = parts.costs
        self._prices = work_prices(parts.costs) if parts.costs else None
        self.async_steps = AsyncSteps(parts.async_executor) if parts.async_executor else None
        self._in_flight: InFlightStep | None = None
        self._committed = -math.inf  # when the last step was committed
        self._plan_ahead = True  # else new settings wait for a moment without a step in flight

    @property
    def has_work(self) -> bool:
        return (
            self.scheduler.has_work
            or bool(self._pending)
            or self.adapters.busy
            or self.connectors.busy
        )

    @property
    def in_flight(self) -> bool:
        """True while a step was launched and is not committed."""
        return self._in_flight is not None

    # -- requests ----------------------------------------------------------------------------------
    def submit(self, request: Request) -> list[Event]:
        """Take a request. A refusal is an event too, so that each request is answered."""
        self.wake = None
        try:
            part = self._pending.add(request)
        except Refused as refused:
            return _refused(request, refused)
        if part is None:
            self.latency.open(request, self.clock())
            return self._add(request)
        self.latency.open(request, self.clock(), part)
        return self._admit_ready()

    def _admit_ready(self) -> list[Event]:
        """Hand the scheduler the pending requests that can run now."""
        events: list[Event] = []
        for request, refused in self._pending.pop_ready():
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
                # a replay, which knows no forecasts, may have taken it
                self._log.left(now, request.id)
            return _refused(request, refused)
        return []

    def abort(self, id: int) -> Timings | None:
        """Forget a request and free its blocks now; unknown ids are of requests that just finished.
        Returns where its time went until now."""
        self.wake = None
        now = self.clock()
        timings = self.latency.close(id, now)
        self._slo.forget(id)
        self._pending.remove(id)
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
        """Give up what a conversation keeps: requests that wait for its memory may come in."""
        if self._log is not None:
            self._log.released(self.clock(), name)
        self.stack.sessions.release(name)
        self.wake = None

    def forget_prefixes(self) -> None:
        """Forget all KV that is only kept because a later request might find it."""
        if self._log is not None:
            self._log.forgot(self.clock())
        self.connectors.forget(self.stack.pins.forget_others)

    def reconfigure(self, wanted: SchedulerConfig, widest: int) -> bool:
        """Go on with other settings. False if that has to wait, see SchedulerStack.reconfigure."""
        if not self.stack.reconfigure(wanted, widest):
            self._plan_ahead = self._in_flight is None
            return False
        if self._log is not None:
            settings = {name: getattr(wanted, name) for name in CHANGEABLE}
            self._log.changed(self.clock(), settings, widest)
        return True

    # -- steps -------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """Commit one step. Returns its events; sets `wake` when there was nothing to run."""
        self.connectors.step(self)
        events = (self._admit_ready() if self._pending else []) + self._expire()
        step = self._in_flight
        if step is None:
            start = self.clock()
            plan = self.scheduler.plan(start)
            self.latency.plan(plan)
            self.wake = plan.wake
            if not plan.items:
                return events + self._idle(plan, start)
            step = self._begin(plan, start)
            self._note_begin(step.planned, plan.items)
            if self.async_steps and self._plan_ahead and self.async_steps.can_run(plan):
                self.async_steps.launch(step, None)
        else:
            self.latency.plan(step.plan)
            self._note_begin(self.clock(), step.plan.items)
            self.wake = None
        self._note_rows(step.plan.items)
        behind = self._launch_behind(step) if step.launched is not None else None
        self._in_flight, self._plan_ahead = behind, True
        result = self._result(step, behind)
        if self.async_steps:  # it had the device to itself from the end of the step before it on
            step.plan.at = max(step.plan.at, self._committed)
            step.start = max(step.start, self._committed)
            step.planned = max(step.planned, self._committed)
        return events + self._commit(step, result)

    def _expire(self) -> list[Event]:
        """End the requests whose deadline has passed."""
        now = self.clock()
        events = self._slo.expired(now)
        if self._log is not None:
            for event in events:
                self._log.left(now, event.id)
        return [self._with_timings(event, now) for event in events]

    def _begin(self, plan: Plan, start: float, *, ahead: bool = False) -> InFlightStep:
        """Note what must be known of a plan before it is computed."""
        computed = [item.start for item in plan.items] if self._log is not None else []
        work = work_of(plan, self._costs.window if self._costs else 0)
        return InFlightStep(plan, start, self.clock(), computed, work, ahead)

    def _launch_behind(self, step: InFlightStep) -> InFlightStep | None:
        """Plan the step behind the one in flight, and launch it if its requests can run
        asynchronously."""
        assert self.async_steps is not None
        if not self._plan_ahead or self.async_steps.holds(self.scheduler.running):
            return None
        start = self.clock()
        plan = self.scheduler.plan_ahead(start)
        if not plan.items:
            return None
        behind = self._begin(plan, start, ahead=True)
        if self.async_steps.can_run(plan):
            self._note_begin(behind.planned, step.plan.items + plan.items)
            self.async_steps.launch(behind, step.launched)
        return behind

    def _result(self, step: InFlightStep, behind: InFlightStep | None) -> Result:
        """Return the result of a step: collected, or run now for its sequences that still run."""
        if step.launched is not None and self.async_steps is not None:
            result = self.async_steps.collect(step, behind)
            if result is not None:
                return result
        plan = step.plan
        if not step.ahead and not step.copied:
            return self._run(plan)
        items = [item for item in plan.items if item.sequence.state is State.RUNNING]
        part = part_of(plan, items) if step.copied else replace(plan, items=items)
        result = self._run(part) if items else Result()
        found = iter(result.outputs)
        running = (item.sequence.state is State.RUNNING for item in plan.items)
        return Result([next(found) if one else Output() for one in running], result.spent)

    def _run(self, plan: Plan) -> Result:
        """Return the result of the plan, or of parts of it where the whole raises."""
        try:
            result = self.executor.run(plan)
        except EngineFault:  # its own word that it cannot go on
            raise
        except Exception as error:
            begun = self.clock()
            return self._bisection.run_parts(
                self.executor, plan, error, lambda items: self._note_begin(begun, items)
            )
        self._bisection.in_a_row = 0
        return result

    def _note_begin(self, now: float, items: list[Item]) -> None:
        """Make the requests of these items the only suspects of a crash; the time of a hang begins
        anew."""
        if self.ledger is not None:
            self.ledger.begin(now, [item.sequence.request.id for item in items])

    def _note_rows(self, items: list[Item]) -> None:
        """Note each row of the step while the live view is open, and whether it is of a prompt or
        recomputed."""
        if self.ledger is not None and self.ledger.watched:
            rows = []
            for item in items:
                seq = item.sequence
                prompt = seq.computed < max(seq.prompt_len, seq.max_computed_tokens)
                rows.append((seq.request.id, item.n, prompt))
            self.ledger.note(rows)

    def _commit(self, step: InFlightStep, result: Result) -> list[Event]:
        """Make what was computed part of the sequences, and report it to the observers."""
        plan, step_times = step.plan, self.stack.step_times
        each = step_times.each if step_times.steps else math.inf
        now = self.clock()
        events = self.scheduler.commit(plan, result, now)
        if self.ledger is not None:
            self.ledger.finish(now)
        self._slo.saw(events, now)
        if self._log is not None:
            load = self.scheduler.load
            done = Done(step.start, now, plan, step.computed, result, events, load, step.work)
            self._log.stepped(done)
        end = self.clock()
        times = StepTimes(step.start, step.planned, now, end, result.spent, each)
        self.latency.step(plan, times)
        if self._costs is not None:
            beside = sum(seconds for part, seconds in result.spent.items() if part != "sampling")
            demand = self._costs.demand(step.work)
            self.work.add(demand, end - step.start, now - step.planned - beside)
        events = [self._with_timings(event, end) for event in events]
        self._committed = self.clock()
        return events

    def _idle(self, plan: Plan, start: float) -> list[Event]:
        """Note that there is nothing to run: the engine waits on purpose, and is not stuck."""
        self._plan_ahead = True
        if self._pending or self.adapters.busy or self.connectors.busy:
            self.wake = min(plan.wake or math.inf, self.clock() + PENDING_NAP)
        if self.ledger is not None and self.wake is not None:
            self.ledger.finish(self.clock())
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
        self.connectors.close()
        if self._log is not None:
            self._log.close()

    def stats(self) -> dict[str, float]:
        """The figures of the scheduler, of targets and of the work. Pending requests count as
        waiting."""
        figures = self.scheduler.stats() | self._slo.stats()
        figures["deferred"] = float(len(self._pending))
        figures["waiting"] += figures["deferred"]
        return figures | self.work.as_dict() | self.adapters.stats()


def _refused(request: Request, refused: Refused) -> list[Event]:
    failure = Failure(refused.code, refused.message, refused.retry_after)
    event = Event(request.id, 0, len(request.prompt), finish="error", failure=failure)
    return [event]
