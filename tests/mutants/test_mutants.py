"""Each seeded bug is caught by the property machine or by a promise; without it the same run passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.scheduler.ahead_machine import AheadMachine
from tests.scheduler.machine import Machine
from tests.scheduler.pool_machine import PoolMachine

from support.schedulers import make_stack

from . import ahead, memory, plugs, scheduling, sessions  # noqa: F401
from .bugs import BUGS, Bug, seeded

pytestmark = pytest.mark.slow  # they guard the tests, not the product
ILL_WRITTEN = (
    AttributeError,
    NameError,
    RecursionError,
    TypeError,
)  # not what bugs of the product end in
SOON = 12  # runs of the machine before the promises are looked at
RUNS = 400  # at most; nearly every bug is caught within ten


def machine(bug: Bug, seed: int) -> Machine:
    one = (AheadMachine if bug.ahead else Machine)(seed, make_stack, bug.config, load=bug.load)
    one.punctual = one.punctual if bug.punctual is None else bug.punctual
    one.searching = one.searching if bug.searches is None else bug.searches
    return one


def runs(bug: Bug) -> Iterator[Callable[[], object]]:
    """What the bug is looked for in, the likeliest first. Each can be run again, with or without it."""
    for seed in range(RUNS):
        if seed == SOON:
            yield from (lambda promise=promise: promise(make_stack) for promise in bug.promises)
        yield lambda seed=seed: machine(bug, seed).run()
        yield lambda seed=seed: PoolMachine(seed).run()


def failing(bug: Bug) -> Callable[[], object] | None:
    """The first run that fails with the bug in the product."""
    with seeded(bug):
        for run in runs(bug):
            try:
                run()
            except ILL_WRITTEN:
                raise
            except Exception:
                return run
    return None


@pytest.mark.parametrize("name", BUGS)
def test_it_is_caught(name: str) -> None:
    run = failing(BUGS[name])
    assert run is not None, f"{RUNS} random runs did not notice: {name}"
    run()  # without the bug it passes


def test_each_promise_has_two() -> None:
    counts = Counter(bug.breaks for bug in BUGS.values())
    assert [promise for promise, n in counts.items() if n < 2] == []
