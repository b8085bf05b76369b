"""How many replicas goodput asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.router.autoscaling import LIMIT, GoodputPolicy

PLACES, ANSWERS = 10, 20  # of each replica


def context(
    now: int,
    met: list[float],
    busy: list[float],
    queued: float = 0.0,
    places: int = PLACES,
    **state: float,
) -> Any:
    """met: shares of the targets; busy: requests under way for each place."""
    told = {
        "met": {i: share * ANSWERS for i, share in enumerate(met)},
        "answers": dict.fromkeys(range(len(met)), ANSWERS),
        "open": {i: share * places for i, share in enumerate(busy)},
        "busy": dict(enumerate(busy)),
    }
    return SimpleNamespace(
        current_num_replicas=now,
        aggregated_metrics=told,
        total_queued_requests=queued,
        policy_state=state,
    )


@pytest.mark.parametrize(
    ("now", "met", "busy", "queued", "wanted"),
    [
        (1, [1.0], [0.5], 0, 1),  # all is well
        (1, [0.9], [0.5], 0, 2),  # targets are missed
        (
            1,
            [0.9],
            [0.2],
            0,
            2,
        ),  # with two of ten places taken: the other one would have been in time
        (2, [1.0, 0.5], [0.7, 0.7], 0, 3),  # at one of them
        (1, [0.5], [0.0], 0, 1),  # they were missed a while ago: nobody is there now
        (1, [0.5], [0.1], 0, 1),  # whoever is alone would be alone elsewhere too
        (2, [0.5, 0.5], [0.1, 0.1], 0, 2),
        (1, [1.0], [1.5], 0, 2),  # no targets, and requests wait
        (1, [1.0], [0.5], 3, 2),  # they wait at Serve
        (2, [1.0, 1.0], [0.2, 0.2], 0, 1),  # one would do
        (2, [1.0, 1.0], [0.5, 0.5], 0, 2),  # it would not
        (2, [0.5, 1.0], [0.1, 0.1], 0, 2),  # not while targets are missed
        (1, [1.0], [0.0], 0, 1),  # the last one stays
        (1, [], [], 9, 1),  # nobody has said anything yet
    ],
)
def test_the_rule(
    now: int, met: list[float], busy: list[float], queued: float, wanted: int
) -> None:
    assert GoodputPolicy()(context(now, met, busy, queued))[0] == wanted


def test_the_goal_is_a_setting() -> None:
    assert GoodputPolicy(goal=0.5)(context(1, [0.6], [0.5]))[0] == 1
    assert GoodputPolicy(goal=0.7)(context(1, [0.6], [0.5]))[0] == 2


def test_many_places_do_not_hide_that_targets_are_missed() -> None:
    """A dozen long prompts in 256 places: overloaded all the same."""
    assert GoodputPolicy()(context(1, [0.8], [12 / 256], places=256))[0] == 2


def test_answers_count_not_replicas() -> None:
    told = context(2, [1.0, 0.0], [0.5, 0.5])
    told.aggregated_metrics["answers"][1] = 0.1  # hardly any of 20
    assert GoodputPolicy()(told)[0] == 2


def test_what_a_replica_bears_is_learned() -> None:
    """None is taken away at a load that was too much for fewer, however many places are empty."""
    rule, places = GoodputPolicy(), 100
    state = rule(context(2, [0.8, 0.8], [0.1, 0.1], places=places))[1]
    assert state == {LIMIT: pytest.approx(0.1)}
    well = [1.0] * 3
    assert rule(context(3, well, [0.065] * 3, places=places, **state)) == (3, state)
    assert GoodputPolicy()(context(3, well, [0.065] * 3, places=places))[0] == 2, (
        "who knows nothing does"
    )
    assert rule(context(3, well, [0.03] * 3, places=places, **state))[0] == 2
    # more than that went well: it bears more
    state = rule(context(3, well, [0.4] * 3, places=places, **state))[1]
    assert state == {LIMIT: pytest.approx(0.4)}
    assert rule(context(3, well, [0.065] * 3, places=places, **state))[0] == 2
