"""What the system is told about parts of mapped files, so that a load streams: read ahead, or let go.

Only hints: whatever becomes of them, the bytes are the same.
"""

from __future__ import annotations

import contextlib
import mmap


def advise(data: mmap.mmap | bytes, offset: int, nbytes: int, *, needed: bool) -> None:
    """needed: read these bytes ahead, in the background. Else: they do not count as this process' memory any
    more (they may stay in the page cache)."""
    advice = getattr(mmap, "MADV_WILLNEED" if needed else "MADV_DONTNEED", None)
    if advice is None or nbytes == 0 or isinstance(data, bytes):
        return
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError, ValueError):
        data.madvise(advice, start, offset + nbytes - start)
