"""How many replicas goodput asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.router.autoscaling import GoodputPolicy


def context(now: int, met: list[float], busy: list[float], queued: float = 0.0) -> Any:
    told = {"met": dict(enumerate(met)), "busy": dict(enumerate(busy))}
    return SimpleNamespace(current_num_replicas=now, aggregated_metrics=told, total_queued_requests=queued)


@pytest.mark.parametrize(
    ("now", "met", "busy", "queued", "wanted"),
    [
        (1, [1.0], [0.5], 0, 1),  # all is well
        (1, [0.9], [0.5], 0, 2),  # targets are missed
        (2, [1.0, 0.5], [0.7, 0.7], 0, 3),  # at one of them
        (1, [0.5], [0.0], 0, 1),  # they were missed a while ago: nobody is there now
        (1, [1.0], [1.5], 0, 2),  # no targets, and requests wait
        (1, [1.0], [0.5], 3, 2),  # they wait at Serve
        (2, [1.0, 1.0], [0.2, 0.2], 0, 1),  # one would do
        (2, [1.0, 1.0], [0.5, 0.5], 0, 2),  # it would not
        (2, [0.5, 1.0], [0.1, 0.1], 0, 2),  # not while targets are missed
        (1, [1.0], [0.0], 0, 1),  # the last one stays
        (1, [], [], 9, 1),  # nobody has said anything yet
    ],
)
def test_the_rule(now: int, met: list[float], busy: list[float], queued: float, wanted: int) -> None:
    assert GoodputPolicy()(context(now, met, busy, queued)) == (wanted, {})


def test_the_goal_is_a_setting() -> None:
    assert GoodputPolicy(goal=0.5)(context(1, [0.6], [0.5]))[0] == 1
    assert GoodputPolicy(goal=0.7)(context(1, [0.6], [0.5]))[0] == 2
