"""What holds for every test."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # tests run beside many other jobs
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own, for five minutes at most."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    named = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**named), 300))
    return True
