"""A thread that waits for the disk, so that the event loop does not.

Owns the thread and the way to it and back: one piece of work after the other, in the order in which
they were given. Only for work whose length the server decides, such as a transaction; text of
clients is read by text workers. Must not know what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class DiskThread:
    """A thread for disk work. It starts with its first work, and does not delay the end of the
    process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def do(self, work: Callable[P, T], *what: P.args, **more: P.kwargs) -> T:
        """Run `work` in the thread, and return or raise its outcome. Cancelling the caller does not
        stop the work."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(found: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(found) if error is None else done.set_exception(error)

        def run() -> None:
            found, failed = None, None
            try:
                found = work(*what, **more)
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, found, failed)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(run)
        return cast(T, await done)

    def close(self) -> None:
        """Wait until everything is done that was given to it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
