"""A step that raises is run again in halves, until what raises is alone: one request fails, the
others go on.

Owns which part of a plan is run again, and the failure of a guilty request. Must not know the
scheduler, the channel or what is computed: until it is committed a plan may be run again, and so
may any part of it, but for the copies of blocks, which are made once.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pageturner.errors import EngineFault, lacks_memory
from pageturner.executor.runner import Executor
from pageturner.request import Failure
from pageturner.scheduler.types import Item, Output, Plan, Result

log = logging.getLogger("pageturner")

# a lack of memory is the machine's: the request may be innocent, and may come again
NO_MEMORY = Failure(
    "out_of_memory", "the engine has too little memory at the moment: ask again", 1.0
)
MAX_IN_A_ROW = 3  # steps in which nothing at all could be computed until that is no request's fault
Begin = Callable[[list[Item]], None]


class StepBisection:
    """Runs plans again that raised. Single-threaded, as the engine is.

    An exception that does not come again in the halves costs no request anything. One request that
    raises alone gets a Failure. Where everything raises, the executor is broken and not a request:
    the exception goes on, the process ends, and the supervisor recovers. Where a request is alone
    in its steps it is not known which of both it is: it fails, but MAX_IN_A_ROW such steps with
    none that succeeds between them are the executor's fault.

    in_a_row  steps so far that gave nothing but failures; the engine makes it 0 with each that
              succeeds
    """

    def __init__(self) -> None:
        self.in_a_row = 0

    def run_parts(self, executor: Executor, plan: Plan, raised: Exception, begin: Begin) -> Result:
        """The result of a plan that raised as a whole: halves of halves, in its order, with a
        Failure for each item that raises when it is alone. Raises what the whole did where nothing
        can be computed.

        Its copies of blocks were made when the whole was run, and must not be made again: the last
        owner of a block that was copied may write into it in the same step.

        begin  called with the items of each part before it is run
        """
        log.error(
            "a step of %d sequences raised %s: it is run in halves", len(plan.items), _where(raised)
        )
        outputs: dict[int, Output] = {}
        spent: Counter[str] = Counter()
        succeeded = False
        parts = _halves(list(enumerate(plan.items)))
        while parts:
            part = parts.pop()
            items = [item for _, item in part]
            begin(items)
            try:
                result = executor.run(part_of(plan, items))
            except EngineFault:
                raise
            except Exception as error:
                if len(part) > 1:
                    parts += _halves(part)
                else:
                    outputs[part[0][0]] = Output(failure=_failure(items[0], error))
                continue
            succeeded = True
            spent.update(result.spent)
            outputs.update(zip([place for place, _ in part], result.outputs, strict=True))
        self.in_a_row = 0 if succeeded else self.in_a_row + 1
        if not succeeded and (len(plan.items) != 1 or self.in_a_row >= MAX_IN_A_ROW):
            raise raised
        return Result([outputs[place] for place in range(len(plan.items))], dict(spent))


def part_of(plan: Plan, items: list[Item]) -> Plan:
    """Some items of a plan whose copies were made already."""
    return replace(plan, items=items, copies=[], ballast=[])


def _halves(part: list[tuple[int, Item]]) -> list[list[tuple[int, Item]]]:
    """Return both halves as a stack with the first half on top. A single item is tried once more as
    it is."""
    middle = (len(part) + 1) // 2
    return [half for half in (part[middle:], part[:middle]) if half]


def _failure(item: Item, error: Exception) -> Failure:
    """Return the failure of a guilty request. The text of an exception may hold what a client
    wrote: it is left out."""
    if lacks_memory(error):
        return NO_MEMORY
    where = _where(error)
    log.error("request %d raises %s: it fails, the others go on", item.sequence.request.id, where)
    return Failure(
        "step_failed", f"computing this request failed with {where}; other requests go on"
    )


def _where(error: Exception) -> str:
    """The kind of an exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    return f"{type(error).__name__} in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
