"""Orders, policies and admission do what they are for (see promises.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.schedulers import make_stack

from .promises import PROMISES, Build


@pytest.mark.parametrize("promise", [promise for group in PROMISES.values() for promise in group])
def test_it_is_kept(promise: Callable[[Build], None]) -> None:
    promise(make_stack)
