"""How a replica's work is counted in predicted tokens, between its reports and by its engine."""

from __future__ import annotations

import random

import pytest

from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.router.load_balancer import FIRST_GUESS, TokenLoad, UsualRequest, expected_tokens
from pageturner.server.pages import predicted_load
from support.schedulers import make_stack


def test_what_a_request_is_expected_to_cost() -> None:
    assert expected_tokens(100, 64, 200, 0) == 236
    assert expected_tokens(100, 64, 200, 50) == 86
    assert expected_tokens(10, 64, 0, 0) == FIRST_GUESS


def test_a_report_is_counted_down_and_what_came_since_is_added() -> None:
    load = TokenLoad()
    old = [load.began(100) for _ in range(4)]
    assert load.tokens == 400
    load.ask()
    late = load.began(50)
    assert load.tokens == 450
    load.report(1000.0, 4, 300.0)
    assert (load.tokens, load.answer) == (1050, 300), (
        "what came while it was asked is not in its report"
    )
    load.ended(old[0])
    assert load.tokens == 800
    load.ended(late)
    assert load.tokens == 750
    for share in old[1:]:
        load.ended(share)
    assert load.tokens == 0
    load.ask()
    load.report(0.0, 0, 0.0)
    assert load.answer == 300, "an idle replica expects none"


@pytest.mark.parametrize("seed", range(5))
def test_one_that_never_reports_ends_at_nothing(seed: int) -> None:
    dice, load, open = random.Random(seed), TokenLoad(), []
    for _ in range(300):
        move = dice.random()
        if move < 0.4:
            open.append(load.began(dice.randint(1, 1000)))
        elif move < 0.8 and open:
            load.ended(open.pop(dice.randrange(len(open))))
        else:
            load.ask()
        assert load.tokens == sum(tokens for _, tokens in open)


def test_a_usual_request() -> None:
    usual = UsualRequest()
    assert usual.requests(0.0) == 0.0
    usual.add(200)
    assert usual.requests(500.0) == 2.5
    for _ in range(500):
        usual.add(100)
    assert usual.requests(500.0) == pytest.approx(5.0, rel=1e-3)


def test_an_engine_says_what_it_has_to_do() -> None:
    stack = make_stack(num_blocks=400, block_size=16, max_model_len=4000)
    scheduler = stack.scheduler
    assert scheduler.stats()["backlog_tokens"] == 0
    for i in range(200):
        scheduler.add(Request(i + 1, tuple(range(i, i + 40)), SamplingParams(max_tokens=10)))
    stats = scheduler.stats()
    assert stats["backlog_sequences"] == 200
    assert 200 * 41 <= stats["backlog_tokens"] <= 200 * 50
    assert 1 <= stats["backlog_answer"] <= 10


def test_what_a_server_says_counts_those_that_its_engine_has_not_told() -> None:
    assert predicted_load({}, 3) == {}
    told = {"backlog_tokens": 300.0, "backlog_sequences": 3.0, "backlog_answer": 80.0}
    assert predicted_load(told, 3) == {"predicted_tokens": 300, "answer_tokens": 80.0}
    assert predicted_load(told, 5)["predicted_tokens"] == 500
    assert (
        predicted_load({"backlog_tokens": 0.0, "backlog_sequences": 0.0}, 0)["predicted_tokens"]
        == 0
    )
