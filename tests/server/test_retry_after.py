"""RetryAfter of a full server, and a simulation of clients that come back when they are told to."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

import pytest

from pageturner.server.engine_client.retry_after import RetryAfter

Service = Callable[[random.Random], float]


SECONDS = 120.0


def simulate(
    seed: int, serve: Service, slots: int, limit: int, crowd: int
) -> tuple[Counter[bool], int]:
    """Whether who came back after its Retry-After got in, and how many were served. As many clients as there
    are places ask again and again; then a crowd comes at once; and all who are refused come when told."""
    chance, places, held = random.Random(seed), RetryAfter(limit), Counter[bool]()
    waiting = running = served = 0
    now = 0.0
    agenda: list[tuple[float, int, str, int]] = []
    numbers = iter(range(1, 1_000_000))

    def at(when: float, what: str, again: int = 0) -> None:
        heapq.heappush(agenda, (when, next(numbers), what, again))

    for _ in range(limit):
        at(0.0, "ask")
    for _ in range(crowd):
        at(20.0, "ask")
    while now < SECONDS:
        now, number, what, again = heapq.heappop(agenda)
        if what == "end":
            running -= 1
            served += 1
            places.ended(now)
            at(now + chance.expovariate(2.0), "ask")
        else:
            request = again or number
            wait = places.ask(request, waiting + running, 1, now)
            held[wait == 0] += bool(again)
            if wait:
                at(now + wait + chance.uniform(0, 0.1), "ask", request)
            else:
                waiting += 1
        while waiting and running < slots:
            waiting, running = waiting - 1, running + 1
            at(now + serve(chance), "end")
    return held, served


@pytest.mark.parametrize(
    "serve",
    [
        lambda chance: chance.expovariate(1.0),
        lambda chance: chance.uniform(0.5, 1.5),
        lambda _: 1.0,
    ],
    ids=["random", "spread", "in step"],
)
@pytest.mark.parametrize(
    ("slots", "limit", "crowd"), [(8, 40, 40), (16, 200, 40), (8, 40, 5), (4, 64, 200)]
)
def test_who_comes_back_when_told_gets_in_nine_times_of_ten(
    serve: Service, slots: int, limit: int, crowd: int
) -> None:
    held, served = simulate(0, serve, slots, limit, crowd)
    assert held.total() > 20
    assert held[True] >= 0.9 * held.total(), held
    assert served >= 0.95 * slots * SECONDS, "kept places cost nothing"


def test_more_is_left_over_where_some_answers_are_far_longer_than_others() -> None:
    held, _ = simulate(3, lambda chance: 0.3 * chance.paretovariate(1.2), 4, 12, 30)
    assert held[False] < held[True] / 9


def test_a_long_line_is_told_when_it_is_its_turn() -> None:
    """3,000 come at once where a hundred places a second become free."""
    places, taken, now, held = RetryAfter(100), 100, 1.0, 0
    for i in range(100):
        places.ended(i / 100)
    line = sorted((now + places.ask(i, taken, 1, now), i) for i in range(3000))
    for due, i in line:
        while now < due:
            now, taken = now + 0.01, max(0, taken - 1)
            places.ended(now)
        if not places.ask(i, taken, 1, now):
            held, taken = held + 1, taken + 1
    assert held >= 0.9 * len(line)
    assert now < 1.0 + 1.2 * len(line) / 100, "nor is it told to wait for longer than it takes"


def test_nobody_can_make_everybody_wait() -> None:
    """By asking for many places, or often, when there are none."""
    places = RetryAfter(100)
    assert places.ask("first", 0, 100, 0.0) == 0
    for i in range(100):
        places.ended(i / 100)
    for i in range(3000):
        assert places.ask(f"large {i}", 100, 90, 1.0) <= 35, (
            "as long as 3,000 take who all come, and 90"
        )
        assert places.ask(i, 100, 1, 1.0) <= 34
    assert places.ask("late", 40, 1, 1.0) == 0, "half of the places are for everybody"
    for i in range(6000):
        places.ended(1.0 + i / 100)
    for i in range(3000):  # of the others nobody has come
        assert places.ask(f"again {i}", 100, 1, 61.0) <= 5


def test_who_comes_back_for_more_than_was_promised_lengthens_no_wait() -> None:
    places, untouched, now = RetryAfter(100), RetryAfter(100), 0.0
    for _ in range(50):
        for _ in range(10):
            now += 0.1
            places.ended(now)
            untouched.ended(now)
        assert places.ask("greedy", 100, 100, now) > 0, "more than is kept for anybody"
        assert places.ask("greedy", 100, 1, now) == 1
    now += 1.0
    assert places.ask("greedy", 100, 100, now) > 0
    assert places.ask("other", 100, 25, now) == untouched.ask("other", 100, 25, now)


def test_several_places_of_few_are_kept_too() -> None:
    places = RetryAfter(12)
    wait = places.ask("a", 12, 4, 0.0)
    assert places.ask("b", 8, 1, wait - 0.5) > 0, "four are kept"
    assert places.ask("a", 8, 4, wait) == 0


def test_a_promise_is_kept_and_forgotten() -> None:
    places = RetryAfter(2)
    wait = places.ask("a", 2, 1, 0.0)
    assert places.ask("b", 1, 1, 0.0) > wait, "the place is kept"
    assert places.ask("a", 1, 1, wait) == 0
    assert places.ask("c", 1, 1, wait + 1.0) > 0
    assert places.ask("c", 1, 1, 60.0) == 0
