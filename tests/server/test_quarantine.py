"""Poison is found by halving, and nobody innocent is ever convicted."""

from __future__ import annotations

import random

import pytest

from pageturner.server.engine_client.quarantine import PATIENCE, Quarantine
from pageturner.server.engine_client.restarts import MAX_BACKOFF, START_TIMEOUT, Restarts


class World:
    """Requests that gain a token in each step, and an engine that dies in any step with a poisoned one."""

    def __init__(self, count: int, poisoned: set[int], batch: int = 64) -> None:
        self.tokens = dict.fromkeys(range(count), 0)
        self.poisoned = poisoned
        self.batch = batch
        self.quarantine = Quarantine()
        self.convicted: list[int] = []
        self.crashes = 0

    def step(self) -> None:
        executing = [id for id in self.tokens if self.quarantine.allows(id)][: self.batch]
        if self.poisoned & set(executing):
            self.crashes += 1
            culprit = self.quarantine.crash(executing, self.tokens)
            if culprit is not None:
                self.convicted.append(culprit)
                del self.tokens[culprit]
            return
        for id in executing:
            self.tokens[id] += 1
        while self.quarantine.settle(self.tokens):
            pass


@pytest.mark.parametrize("count", [1, 2, 3, 16, 37])
def test_each_single_culprit_is_found_within_a_bound(count: int) -> None:
    for culprit in range(count):
        world = World(count, {culprit})
        for _ in range(60):
            world.step()
        assert world.convicted == [culprit]
        assert world.crashes <= 3 + count.bit_length()
        assert min(world.tokens.values(), default=1) > 0
        assert not world.quarantine.active


def test_several_culprits_small_batches_and_newcomers() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        poisoned = set(rng.sample(range(20), rng.randint(0, 3)))
        world = World(20, poisoned, batch=rng.choice([2, 5, 64]))
        for step in range(800):
            if step < 40 and rng.random() < 0.3:
                world.tokens[100 + step] = 0
            for id in [id for id, n in world.tokens.items() if n > 20]:
                del world.tokens[id]  # finished
            world.step()
        assert set(world.convicted) == poisoned
        assert not world.tokens


def test_a_crash_from_outside_convicts_nobody() -> None:
    quarantine, tokens = Quarantine(), dict.fromkeys(range(16), 0)
    for n in range(50):
        tokens = dict.fromkeys(tokens, n)
        assert quarantine.crash(list(tokens), tokens) is None
        assert all(quarantine.allows(id) for id in tokens)


def test_a_second_crash_without_a_token_makes_suspects_and_tokens_clear_them() -> None:
    quarantine, tokens = Quarantine(), {1: 0, 2: 0, 3: 0}
    assert quarantine.crash([1, 2], tokens) is None
    assert quarantine.crash([1, 2], tokens) is None
    assert [quarantine.allows(id) for id in (1, 2, 3)] == [True, False, False]
    assert quarantine.settle({1: 1, 2: 0, 3: 0})
    assert [quarantine.allows(id) for id in (1, 2, 3)] == [True, True, False]
    assert quarantine.settle({1: 1, 2: 1, 3: 0})
    assert quarantine.allows(3)
    assert not quarantine.active


def test_suspects_that_are_cancelled_do_not_block_the_others() -> None:
    quarantine = Quarantine()
    quarantine.crash([1, 2], {1: 0, 2: 0, 3: 0})
    quarantine.crash([1, 2], {1: 0, 2: 0, 3: 0})
    while quarantine.settle({3: 0}):
        pass
    assert quarantine.allows(3)


# -- killed from outside -------------------------------------------------------------------------------------
def test_patience_with_kills_from_outside_is_per_token() -> None:
    """A lone stream that recomputes a long context is killed again and again before it gets anywhere."""
    quarantine = Quarantine()
    for n in range(50):
        for _ in range(PATIENCE):
            assert quarantine.killed([1], {1: n}) is None
    assert quarantine.strikes == 0
    assert not quarantine.active


def test_whoever_has_the_engine_killed_for_ever_is_found() -> None:
    """As a request does that takes all memory; it is alone, then in a crowd that gains tokens meanwhile."""
    for company in (0, 15):
        quarantine, tokens, deaths, culprit = (
            Quarantine(),
            dict.fromkeys(range(company + 1), 0),
            0,
            None,
        )
        while culprit is None:
            running = [id for id in tokens if quarantine.allows(id)]
            tokens |= {id: tokens[id] + 1 for id in running if id}
            while quarantine.settle(tokens):
                running = [id for id in tokens if quarantine.allows(id)]
            culprit, deaths = quarantine.killed(running, tokens), deaths + 1
        assert (culprit, deaths) == (0, PATIENCE + 2)


def test_kills_from_outside_do_not_convict_who_is_on_trial() -> None:
    quarantine, tokens = Quarantine(), {1: 0, 2: 0}
    quarantine.crash([1, 2], tokens)
    quarantine.crash([1, 2], tokens)
    assert [quarantine.allows(id) for id in (1, 2)] == [True, False]
    for _ in range(PATIENCE):
        assert quarantine.killed([1], tokens) is None
        assert [quarantine.allows(id) for id in (1, 2)] == [True, False]
    assert quarantine.strikes == 4


def test_those_who_only_wait_lose_no_patience() -> None:
    quarantine = Quarantine()
    for _ in range(2 * PATIENCE):
        quarantine.killed([], {1: 0})
    assert quarantine.strikes == 0


# -- pauses and crash loops ----------------------------------------------------------------------------------
def test_pauses_grow_and_end_with_progress() -> None:
    restarts, pauses = Restarts(3), []
    for _ in range(9):
        restarts.lost(progress=False)
        pauses.append(restarts.pause)
    assert pauses == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, MAX_BACKOFF, MAX_BACKOFF]
    assert restarts.looping
    restarts.lost(progress=True)
    assert (restarts.pause, restarts.looping) == (0, False)


def test_a_start_may_take_some_times_as_long_as_the_first_and_more_with_each_failure() -> None:
    restarts = Restarts(3)
    assert restarts.start_timeout(2.0) == START_TIMEOUT
    for seconds in (1.0, 30.0):  # only the first one is the measure
        restarts.started(seconds)
    found = []
    for _ in range(20):
        found.append(restarts.start_timeout(2.0))
        restarts.lost(progress=False)
    assert found[:4] == [10, 20, 40, 80]
    assert found[-1] == START_TIMEOUT
    restarts.lost(progress=True)
    assert (restarts.start_timeout(2.0), restarts.start_timeout(30.0)) == (10, 30)


def test_pauses_stay_bounded_for_ever() -> None:
    restarts = Restarts(0)
    for _ in range(10_000):
        restarts.lost(progress=False)
    assert restarts.pause == MAX_BACKOFF
