"""One step ahead: step k+1 is planned and launched while step k runs, and k is committed then (adr/0066).

Owns which steps are under way and in which order they are launched, collected and committed; and when it is
done in the plain way instead: where somebody's next step depends on the token, and after an error. Must not
know policies, nor how anything is computed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from pageturner.engine.bisect_step import part_of
from pageturner.engine.ledger_notes import note_begin, note_rows
from pageturner.errors import EngineFault
from pageturner.ipc.ledger import Ledger
from pageturner.request import Event, Request
from pageturner.scheduler.types import Output, Plan, Result, State
from pageturner.telemetry.work import StepWork

if TYPE_CHECKING:
    from pageturner.engine.engine import Engine

log = logging.getLogger("pageturner")
Launched = Any  # a step on its way through the device


class AheadExecutor(Protocol):
    """Whoever can begin a step before the one before it is known."""

    def foresees(self, request: Request) -> bool:
        """Whether a step behind one that gives this request a token can begin without that token."""

    def launch(self, plan: Plan, before: Launched | None) -> Launched:
        """Begin a step of requests that are all foreseen. Tokens that are not known yet are taken from the
        step before it, where it is. Nothing waits."""

    def collect(self, launched: Launched) -> Result:
        """Wait for a step that was launched. Each is collected once at the most, in order."""


@dataclass(slots=True)
class Begun:
    """A step that was planned. computed: where each item begins, for the log; times in seconds."""

    plan: Plan
    start: float
    planned: float
    computed: list[int]
    work: StepWork


@dataclass(slots=True)
class _UnderWay:
    """launched: None where it is still to be run, in the plain way; copied: whether its copies of blocks were
    made nevertheless; ahead: whether it was planned behind another one."""

    begun: Begun
    ahead: bool
    launched: Launched | None = None
    copied: bool = False


class StepsAhead:
    """The loop of an engine whose device need not wait for its host. Single-threaded, as the engine is."""

    def __init__(self, executor: AheadExecutor) -> None:
        self._executor = executor
        self._first: _UnderWay | None = None
        self._end = -math.inf  # when the last step was committed
        self._paused = False
        self.made = 0  # steps that were launched ahead

    @property
    def under_way(self) -> bool:
        """Whether a step was begun and not committed."""
        return self._first is not None

    def pause(self) -> None:
        """Plan nothing ahead in the next turn: somebody waits for a moment in which nothing is under way."""
        self._paused = self._first is not None

    def start(self, begun: Begun, ledger: Ledger | None) -> bool:
        """Begin a step when none is under way. False if it is to be run in the plain way."""
        if self._paused or not self._foreseen(begun.plan):
            self._paused = False
            return False
        note_begin(ledger, begun.planned, begun.plan.items)
        self._first = self._launch(_UnderWay(begun, ahead=False), None)
        return True

    def turn(self, engine: Engine, ledger: Ledger | None) -> list[Event]:
        """Plan and launch the next step, then wait for the one that was under way, and commit it."""
        first, behind = self._first, None
        assert first is not None
        plan = first.begun.plan
        if first.ahead:
            engine.latency.plan(plan)
        note_begin(ledger, engine.clock(), plan.items)
        note_rows(ledger, plan.items)
        if first.launched is not None and not self._paused:
            behind = self._behind(engine, first, ledger)
        self._first, self._paused, engine.wake = behind, False, None
        result = self._result(engine, first, behind, ledger)
        # it had the device to itself from the end of the step before it on
        plan.at = max(plan.at, self._end)
        first.begun.start = max(first.begun.start, self._end)
        first.begun.planned = max(first.begun.planned, self._end)
        events = engine.finish(first.begun, result, ledger)
        self._end = engine.clock()
        return events

    def _foreseen(self, plan: Plan) -> bool:
        return not plan.ballast and all(
            self._executor.foresees(item.sequence.request) for item in plan.items
        )

    def _behind(self, engine: Engine, first: _UnderWay, ledger: Ledger | None) -> _UnderWay | None:
        start = engine.clock()
        plan = engine.scheduler.plan_ahead(start)
        if not plan.items:
            return None
        behind = _UnderWay(engine.begin(plan, start), ahead=True)
        if not self._foreseen(plan):
            return behind
        note_begin(ledger, behind.begun.planned, first.begun.plan.items + plan.items)
        return self._launch(behind, first.launched)

    def _launch(self, step: _UnderWay, before: Launched | None) -> _UnderWay:
        """One that raises is run when its turn comes, and again in halves if need be."""
        step.copied = True  # else it is an EngineFault
        try:
            step.launched = self._executor.launch(step.begun.plan, before)
            self.made += step.ahead
        except EngineFault:
            raise
        except Exception as error:
            log.error(
                "launching a step raised %s: it is run when its turn comes", type(error).__name__
            )
        return step

    def _result(
        self, engine: Engine, first: _UnderWay, behind: _UnderWay | None, ledger: Ledger | None
    ) -> Result:
        """Of the first step under way. Where it raises it is run again, and so is what was launched behind
        it, which took its tokens."""
        if first.launched is not None:
            try:
                return self._executor.collect(first.launched)
            except EngineFault:
                raise
            except Exception as error:
                log.error("a step raised %s: it is run again", type(error).__name__)
                if behind is not None:
                    behind.launched = None
        plan = first.begun.plan
        items = [item for item in plan.items if item.sequence.state is State.RUNNING]
        part = part_of(plan, items) if first.copied else replace(plan, items=items)
        result = engine.computed(part, ledger) if items else Result()
        found = iter(result.outputs)
        running = (item.sequence.state is State.RUNNING for item in plan.items)
        return Result([next(found) if one else Output() for one in running], result.spent)
