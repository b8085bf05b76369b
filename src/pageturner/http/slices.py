"""Long work of the event loop, in slices between which others go on.

Owns how long a slice is. Must not know what is done in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
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
