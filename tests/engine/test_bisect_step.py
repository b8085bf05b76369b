"""A step that raises: whose fault it is, who goes on, and when it is nobody's but the executor's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pageturner.engine.bisect_step import MAX_IN_A_ROW
from pageturner.engine.engine import Engine
from pageturner.engine.fake import FakeExecutor, next_token
from pageturner.errors import EngineFault
from pageturner.ipc.ledger import Ledger
from pageturner.params import SamplingParams
from pageturner.request import Event, Request
from pageturner.scheduler.types import Plan, Result
from support.refusals import engine_fault
from support.schedulers import check, make_stack

VOCAB = 97


class Raising:
    """The fake executor, but `fault` looks at each plan first. runs: the ids of each plan that was run."""

    def __init__(self, fault: Callable[[list[int], int], None]) -> None:
        self._fault, self._inner, self.runs = fault, FakeExecutor(VOCAB), list[list[int]]()

    def run(self, plan: Plan) -> Result:
        self.runs.append([item.sequence.request.id for item in plan.items])
        self._fault(self.runs[-1], len(self.runs))
        return self._inner.run(plan)


def engine_with(fault: Callable[[list[int], int], None]) -> tuple[Engine, Raising]:
    executor = Raising(fault)
    return Engine(make_stack(num_blocks=256, max_model_len=256), executor), executor


def served(engine: Engine, count: int, tokens: int = 9) -> dict[int, list[Event]]:
    """What becomes of `count` requests."""
    for id in range(1, count + 1):
        assert not engine.submit(Request(id, (id, 5), SamplingParams(max_tokens=tokens)))
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        check(engine.stack)
    return {id: [event for event in events if event.id == id] for id in range(1, count + 1)}


def answer(id: int, count: int = 9) -> list[int]:
    tokens = [id, 5]
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[2:]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("guilty", [{1}, {13}, {4, 5}, {1, 2, 3, 11}])
@pytest.mark.parametrize("when", [1, 5])
def test_the_guilty_fail_alone_and_are_told_why(guilty: set[int], when: int) -> None:
    def fault(ids: list[int], run: int) -> None:
        if run >= when and guilty & set(ids):
            raise ValueError("what the client wrote")

    engine, _ = engine_with(fault)
    for id, events in served(engine, 13).items():
        failure = events[-1].failure
        if id in guilty:
            assert failure is not None
            assert failure.code == "step_failed"
            assert "ValueError in fault (test_bisect_step.py:" in failure.message
            assert "client" not in failure.message
            assert tokens(events) == answer(id)[: when - 1]
        else:
            assert (tokens(events), failure) == (answer(id), None)


def test_a_fault_that_does_not_come_again_costs_nobody_anything() -> None:
    def fault(ids: list[int], run: int) -> None:
        if run in (1, 2, 5, 9):
            raise MemoryError

    engine, executor = engine_with(fault)
    assert [tokens(events) for events in served(engine, 4).values()] == [
        answer(id) for id in range(1, 5)
    ]
    assert executor.runs[:5] == [[1, 2, 3, 4], [1, 2], [1], [2], [3, 4]]


def test_where_everything_raises_the_executor_is_broken() -> None:
    def fault(ids: list[int], run: int) -> None:
        raise MemoryError(str(run))

    engine, _ = engine_with(fault)
    with pytest.raises(MemoryError, match=r"^1$"):
        served(engine, 3)


def test_one_alone_fails_until_too_many_in_a_row_do() -> None:
    broken = True

    def fault(ids: list[int], run: int) -> None:
        if broken:
            raise RuntimeError

    engine, _ = engine_with(fault)
    for _ in range(MAX_IN_A_ROW - 1):
        assert served(engine, 1)[1][-1].failure is not None
    broken = False
    assert tokens(served(engine, 1)[1]) == answer(1)
    broken = True
    for _ in range(MAX_IN_A_ROW - 1):
        assert served(engine, 1)[1][-1].failure is not None
    with pytest.raises(RuntimeError):
        served(engine, 1)


def test_an_engine_fault_is_no_requests() -> None:
    def fault(ids: list[int], run: int) -> None:
        raise EngineFault("copy_failed", "blocks could not be copied")

    engine, executor = engine_with(fault)
    with engine_fault():
        served(engine, 3)
    assert len(executor.runs) == 1


def test_the_ledger_names_the_part_that_is_run() -> None:
    """So that a crash or a hang in it has only these suspects."""
    ledger, _ = Ledger.create()
    named: list[list[int]] = []

    def fault(ids: list[int], run: int) -> None:
        named.append(ledger.read()[4])
        if 3 in ids:
            raise ValueError

    engine, executor = engine_with(fault)
    engine.ledger = ledger
    for id in (1, 2, 3):
        engine.submit(Request(id, (id, 5), SamplingParams(max_tokens=2)))
    engine.step()
    assert named == executor.runs == [[1, 2, 3], [1, 2], [3]]
    begun, finished, *_ = ledger.read()
    assert begun == finished == 3


def test_a_lack_of_memory_is_no_fault_of_a_request() -> None:
    def fault(ids: list[int], run: int) -> None:
        if 2 in ids:
            raise MemoryError

    engine, _ = engine_with(fault)
    told = served(engine, 3)
    failure = told[2][-1].failure
    assert failure is not None
    assert (failure.code, failure.retry_after > 0) == ("out_of_memory", True)
    assert tokens(told[1]) == answer(1)
