"""Seeded bugs: how one is put into the product, told what it should break, and taken out again.

A bug is a function that puts broken behaviour in the place of what a method or function does, while the
product stays as it is: it knows what is done, not how it is written. What it replaces it names by reference:
a rename that reaches the tests takes it along, and one that does not is an error, never a bug without effect.

    @bug("every block is counted", config={"policy": "orca"})
    def attach_counts_nothing(swap: Swap) -> None:
        swap.during(BlockPool.attach, Store.share, nothing)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

Promise = Callable[[Callable[..., Any]], None]


@dataclass(frozen=True)
class Bug:
    """One seeded bug.

    breaks    the promise that no longer holds with it
    config    settings under which it is looked for; the others are drawn
    promises  simulations (tests/scheduler/promises.py) that it may be caught by, beside the machine
    load      the kind of load, where it is rare under others
    searches  share of the prompts that are beam searches, where that matters
    punctual  whether requests are held to their deadlines and targets
    ahead     whether it is looked for where steps are planned ahead
    """

    name: str
    breaks: str
    put: Callable[[Swap], None]
    config: dict[str, Any] = field(default_factory=dict)
    promises: tuple[Promise, ...] = ()
    load: str | None = None
    searches: float | None = None
    punctual: bool | None = None
    ahead: bool = False


BUGS: dict[str, Bug] = {}


def bug(breaks: str, **about: Any) -> Callable[[Callable[[Swap], None]], Callable[[Swap], None]]:
    """Register a function as a seeded bug, by its name."""

    def register(put: Callable[[Swap], None]) -> Callable[[Swap], None]:
        assert put.__name__ not in BUGS
        BUGS[put.__name__] = Bug(put.__name__, breaks, put, **about)
        return put

    return register


class Swap:
    """Puts other behaviour in the place of functions of the product, wherever it holds them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def wrap(self, old: Any, wrapper: Callable[..., Any]) -> None:
        """Call wrapper(old, ...) wherever `old`, a method, property or function, would be called."""
        if isinstance(old, property):
            assert old.fget is not None
            self._put(old.fget, old, property(lambda self: wrapper(old.fget, self)))
        else:
            self._put(old, old, lambda *args, **named: wrapper(old, *args, **named))

    def after(self, old: Any, then: Callable[..., None]) -> None:
        """Call then(...) behind `old`, with the same arguments."""

        def both(old: Any, *args: Any, **named: Any) -> Any:
            result = old(*args, **named)
            then(*args, **named)
            return result

        self.wrap(old, both)

    def during(self, outer: Any, inner: Any, wrapper: Callable[..., Any]) -> None:
        """Call wrapper(inner, ...) instead of `inner` while `outer` is under way."""
        depth = [0]

        def count(old: Any, *args: Any, **named: Any) -> Any:
            depth[0] += 1
            try:
                return old(*args, **named)
            finally:
                depth[0] -= 1

        def choose(old: Any, *args: Any, **named: Any) -> Any:
            return wrapper(old, *args, **named) if depth[0] else old(*args, **named)

        self.wrap(outer, count)
        self.wrap(inner, choose)

    def entry(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Put another value in a registry."""
        assert name in table
        self._patch.setitem(table, name, value)

    def _put(self, function: Any, old: Any, new: Any) -> None:
        owner, _, name = function.__qualname__.rpartition(".")
        module = sys.modules[function.__module__]
        if owner:
            assert vars(vars(module)[owner])[name] is old
            self._patch.setattr(vars(module)[owner], name, new)
            return
        holders = [one for key, one in sys.modules.items() if key.startswith("pageturner")]
        places = [(one, key) for one in holders for key, value in vars(one).items() if value is old]
        assert places, f"nobody holds {function.__qualname__}"
        for one, key in places:
            self._patch.setattr(one, key, new)


@contextmanager
def seeded(one: Bug) -> Iterator[None]:
    """The product with that bug in it."""
    with pytest.MonkeyPatch.context() as patch:
        one.put(Swap(patch))
        yield


def nothing(*_: Any, **__: Any) -> None:
    """Instead of what should have been done."""
