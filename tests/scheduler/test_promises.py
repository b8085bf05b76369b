"""Orders, policies and admission do what they are for (see promises.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.schedulers import make_stack

from . import promises
from .promises import PROMISES, Build

DEAR = (  # seconds of processor time each
    promises.liars_gain_nothing_lasting,
    promises.fair_shares,
    promises.batches_are_mixed,
    promises.predicted_room,
    promises.few_enough_run,
)
ALL = [promise for group in PROMISES.values() for promise in group]


@pytest.mark.parametrize(
    "promise", [pytest.param(one, marks=pytest.mark.slow) if one in DEAR else one for one in ALL]
)
def test_it_is_kept(promise: Callable[[Build], None]) -> None:
    promise(make_stack)
