"""Asynchronous steps: step k+1 is launched on the device while step k still runs (adr/0066).

Owns how a step is launched and collected, and what happens when either raises: the step is then run
synchronously when its turn comes. The engine decides when a step is planned, launched and
committed. Must not know policies, the scheduler or how anything is computed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from pageturner.errors import EngineFault
from pageturner.request import Request
from pageturner.scheduler.types import Plan, Result, Sequence
from pageturner.telemetry.work import StepWork

log = logging.getLogger("pageturner")
Launched = Any  # the executor's handle of a step that runs on the device


class AsyncExecutor(Protocol):
    """An executor that can begin a step before the result of the step before it is known.

    holds  whether nothing should be launched behind the step under way: drafts are likely to pay
    """

    @property
    def holds(self) -> bool: ...

    def can_run_async(self, request: Request) -> bool:
        """Return whether the next step of this request can begin without its newest token."""

    def launch(self, plan: Plan, before: Launched | None) -> Launched:
        """Begin a step without waiting. Tokens that are not known yet are taken on the device from
        the step `before`. All requests of the plan can run asynchronously."""

    def collect(self, launched: Launched) -> Result:
        """Wait for a launched step. Steps are collected in order, each at most once."""


@dataclass(slots=True)
class InFlightStep:
    """A planned step that is not committed yet. Times are in seconds.

    computed  the position where each item begins, for the step log
    ahead     whether it was planned before the step in front of it was committed
    launched  the executor's handle; None: the step is to be run synchronously
    copied    whether its copies of blocks were made already, and must not be made again
    """

    plan: Plan
    start: float
    planned: float
    computed: list[int]
    work: StepWork
    ahead: bool = False
    launched: Launched | None = None
    copied: bool = False


class AsyncSteps:
    """Launches and collects steps on one asynchronous executor. made: steps that were launched
    ahead."""

    def __init__(self, executor: AsyncExecutor) -> None:
        self._executor = executor
        self.made = 0

    def can_run(self, plan: Plan) -> bool:
        """Return whether every request of the plan can run asynchronously, and none has a draft."""
        can_run_async = self._executor.can_run_async
        return not plan.ballast and all(
            can_run_async(item.sequence.request) and not item.sequence.draft for item in plan.items
        )

    def holds(self, running: list[Sequence]) -> bool:
        """Return whether the step under way ends before another is planned: somebody has a draft,
        or is likely to get one that pays."""
        return self._executor.holds or any(sequence.draft for sequence in running)

    def launch(self, step: InFlightStep, before: Launched | None) -> None:
        """Begin a step. If the launch raises, the step stays to be run synchronously."""
        step.copied = True  # else the executor raises an EngineFault
        try:
            step.launched = self._executor.launch(step.plan, before)
            self.made += step.ahead
        except EngineFault:
            raise
        except Exception as error:
            name = type(error).__name__
            log.error("launching a step raised %s: it is run when its turn comes", name)

    def collect(self, step: InFlightStep, behind: InFlightStep | None) -> Result | None:
        """Return the result of a launched step. None: it raised and must be run again, and so must
        the step behind it, which took its tokens."""
        try:
            return self._executor.collect(step.launched)
        except EngineFault:
            raise
        except Exception as error:
            log.error("a step raised %s: it is run again", type(error).__name__)
            if behind is not None:
                behind.launched = None
            return None
