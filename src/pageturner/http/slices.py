"""Long work that must not hold up the event loop: in slices between which others go on, or by a
thread of its own.

Owns how long a slice is. Must not know what is done in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from pageturner.http.memory_reserve import MemoryReserve, out_of_memory

T = TypeVar("T")

SLICE_SECONDS = 0.002  # until others go on
SLICE_BYTES = 1 << 20  # that it takes at most until then
MANY_LOGPROBS = (
    64  # of prompt tokens in a piece; more are written in parts, so that others go on in between
)


async def in_slices(parts: Generator[None, None, T], memory: MemoryReserve | None = None) -> T:
    """Return what the parts return. 503 where it takes too much of this memory."""
    began = time.monotonic()
    try:
        while True:
            next(parts)
            if time.monotonic() - began > SLICE_SECONDS:
                if memory is not None and not memory.allows(SLICE_BYTES):
                    raise out_of_memory()
                await asyncio.sleep(0)
                began = time.monotonic()
    except StopIteration as end:
        whole: T = end.value
        return whole


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Return what `work` returns or raises, by a thread of its own that holds up nobody, not even
    the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(found: T | None, error: Exception | None) -> None:
        if future.done():  # nobody wants it any more
            return
        if error is None:
            future.set_result(found)  # type: ignore[arg-type]
        else:
            future.set_exception(error)
            future.exception()  # whoever waited has been told; nobody else has to be

    def run() -> None:
        found, error = None, None
        try:
            found = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settle, found, error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # there is no memory for it
        raise out_of_memory() from None
    return future
