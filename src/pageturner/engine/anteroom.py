"""The anteroom: requests that cannot run yet, each with the future that it waits for.

Owns who waits there and for what. The scheduler only ever sees what can run: requests whose grammar is being
compiled wait here, and whatever else takes time before a request can run will wait in the same room. Must not
know the scheduler or the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pageturner.request import Refused, Request


@dataclass(frozen=True, slots=True)
class _Waiting:
    """check: raises Refused where what the future brings does not let the request run."""

    request: Request
    future: Future[Any]
    check: Callable[[Any], None]


class Anteroom:
    """By the ids of the requests, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, request: Request, future: Future[Any], check: Callable[[Any], None]) -> None:
        """Let a request wait for a future."""
        self._waiting[request.id] = _Waiting(request, future, check)

    def ready(self) -> list[tuple[Request, Refused | None]]:
        """Those whose future is there, and why one of them cannot run after all. They wait no longer."""
        found: list[tuple[Request, Refused | None]] = []
        for id, one in list(self._waiting.items()):
            if one.future.done():
                del self._waiting[id]
                try:
                    one.check(one.future)
                except Refused as refused:
                    found.append((one.request, refused))
                else:
                    found.append((one.request, None))
        return found

    def leave(self, id: int) -> None:
        """A request is not wanted any more. What nobody else waits for is not begun, if it has not been."""
        gone = self._waiting.pop(id, None)
        if gone is not None and all(
            gone.future is not one.future for one in self._waiting.values()
        ):
            gone.future.cancel()
