"""When a replica is put aside for its failures, and how it comes back: pure data, a clock that we turn."""

from __future__ import annotations

import pytest

from pageturner.router.breaker import (
    FEWEST,
    FIRST_PATIENCE,
    MAX_PATIENCE,
    PENALTY,
    RECENT_SECONDS,
    STRIKES,
    Attempts,
    Breaker,
)


class Bench:
    """A breaker, its clock, and what can become of a request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = Breaker(lambda: self.now)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.breaker.begin().failed()

    def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            attempt = self.breaker.begin()
            attempt.answered()
            attempt.ended()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_in_a_row_put_it_aside(bench: Bench) -> None:
    bench.succeed(50)
    bench.fail(STRIKES - 1)
    bench.succeed()
    bench.fail(STRIKES - 1)
    assert bench.breaker.admits()
    bench.fail()
    assert bench.breaker.aside
    assert not bench.breaker.admits()


def test_half_of_all_failing_puts_it_aside_too(bench: Bench) -> None:
    for _ in range(FEWEST - 1):
        bench.succeed()
        bench.fail()
    assert bench.breaker.admits()
    assert bench.breaker.penalty == PENALTY // 2
    bench.succeed()
    bench.fail()
    assert bench.breaker.aside


def test_few_failures_make_it_seem_busier_for_a_while(bench: Bench) -> None:
    bench.fail()
    assert bench.breaker.share == 1 / FEWEST, "one alone says little"
    bench.succeed(7)
    bench.fail()
    assert (bench.breaker.share, bench.breaker.penalty) == (2 / 9, round(PENALTY * 2 / 9))
    bench.now += RECENT_SECONDS + 1
    assert bench.breaker.penalty == 0


def test_patience_grows_and_one_request_at_a_time_tries_it(bench: Bench) -> None:
    bench.fail(STRIKES)
    wanted = FIRST_PATIENCE
    for _ in range(10):
        bench.now += wanted - 0.1
        assert not bench.breaker.admits()
        bench.now += 0.1
        assert bench.breaker.admits()
        trial = bench.breaker.begin()
        assert not bench.breaker.admits(), "one at a time"
        trial.failed()
        wanted = min(2 * wanted, MAX_PATIENCE)
        assert bench.breaker.patience == wanted
    assert bench.breaker.times_aside == 11


def test_an_answer_that_begins_well_brings_it_back(bench: Bench) -> None:
    bench.fail(STRIKES)
    bench.now += FIRST_PATIENCE
    trial = bench.breaker.begin()
    trial.answered()
    assert not bench.breaker.aside
    assert bench.breaker.admits()
    trial.ended()
    assert bench.breaker.share == 0.0
    bench.fail(STRIKES)
    assert bench.breaker.patience == 2 * FIRST_PATIENCE, "it had come back a moment ago"
    bench.now += bench.breaker.patience
    bench.succeed()
    bench.now += MAX_PATIENCE + 1
    bench.fail(STRIKES)
    assert bench.breaker.patience == FIRST_PATIENCE, "it was well for long"


def test_a_trial_that_says_nothing_is_followed_by_another(bench: Bench) -> None:
    bench.fail(STRIKES)
    bench.now += FIRST_PATIENCE
    bench.breaker.begin().dropped()
    assert bench.breaker.aside
    assert bench.breaker.admits()


def test_requests_from_before_change_nothing(bench: Bench) -> None:
    old = [bench.breaker.begin() for _ in range(9)]
    old[0].doubt()
    bench.fail(STRIKES)
    for attempt in old[:4]:
        attempt.failed()
    for attempt in old[4:]:
        attempt.answered()
        attempt.ended()
    assert bench.breaker.aside
    assert (bench.breaker.times_aside, bench.breaker.patience) == (1, FIRST_PATIENCE)
    bench.now += FIRST_PATIENCE
    bench.succeed()
    assert bench.breaker.admits()


def test_an_answer_that_breaks_off_is_a_failure_and_one_whose_client_left_is_none(
    bench: Bench,
) -> None:
    for _ in range(STRIKES):
        attempt = bench.breaker.begin()
        attempt.answered()
        attempt.dropped()
    assert bench.breaker.share == 0.0
    for _ in range(STRIKES):
        attempt = bench.breaker.begin()
        attempt.answered()
        attempt.failed()
    assert bench.breaker.aside


# -- whose fault it is ---------------------------------------------------------------------------------------
def test_an_error_counts_once_another_replica_answers() -> None:
    bad, good = Bench(), Bench()
    for n in range(STRIKES):
        with Attempts(alone=False) as attempts:
            attempts.suspect(attempts.begin(bad.breaker))
            assert bad.breaker.share == n / FEWEST
            attempts.answered(attempts.begin(good.breaker))
    assert bad.breaker.aside
    assert good.breaker.share == 0.0


def test_a_request_that_fails_everywhere_is_held_against_nobody() -> None:
    both = [Bench(), Bench()]
    for _ in range(9):
        with Attempts(alone=False) as attempts:
            for one in both:
                attempts.suspect(attempts.begin(one.breaker))
    assert all(one.breaker.admits() and one.breaker.share == 0.0 for one in both)


def test_where_nobody_else_is_asked_an_error_counts_at_once(bench: Bench) -> None:
    for _ in range(STRIKES):
        with Attempts(alone=True) as attempts:
            attempts.suspect(attempts.begin(bench.breaker))
    assert bench.breaker.aside


def test_who_is_in_many_doubts_gets_nothing_until_they_are_settled(bench: Bench) -> None:
    doubts = [Attempts(alone=False) for _ in range(STRIKES)]
    for attempts in doubts:
        assert bench.breaker.admits()
        attempts.suspect(attempts.begin(bench.breaker))
    assert not bench.breaker.admits()
    for attempts in doubts:
        attempts.__exit__(None, None, None)
    assert bench.breaker.admits()
    assert not bench.breaker.aside


def test_the_least_bad_is_who_comes_back_first() -> None:
    well, doubted, aside, longer = (Bench() for _ in range(4))
    doubted.fail(STRIKES - 1)
    aside.fail(STRIKES)
    longer.now += 7
    longer.fail(STRIKES)
    order = sorted([longer, aside, doubted, well], key=lambda one: one.breaker.badness())
    assert order == [well, doubted, aside, longer]
