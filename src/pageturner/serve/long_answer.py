"""An answer that takes long to write: in slices, so that others go on, and as far as memory allows.

Must not know what is written.
"""

from __future__ import annotations

import asyncio
import time

from pageturner.serve.memory_reserve import MemoryReserve, out_of_memory
from pageturner.serve.replies import InParts

MANY_LOGPROBS = 64  # of prompt tokens in a piece; more are written in parts, so that others go on in between
SLICE_SECONDS = 0.002  # of writing, until others go on
SLICE_BYTES = 1 << 20  # that it takes at most until then


async def written(parts: InParts[bytes], memory: MemoryReserve) -> bytes:
    """The bytes of something long. Others go on in between. 503 where it takes too much memory."""
    began = time.monotonic()
    try:
        while True:
            next(parts)
            if time.monotonic() - began > SLICE_SECONDS:
                if not memory.allows(SLICE_BYTES):
                    raise out_of_memory()
                await asyncio.sleep(0)
                began = time.monotonic()
    except StopIteration as end:
        content: bytes = end.value
        return content
