"""Memory that is kept for answers under way, so that its lack is felt at the door and nowhere else.

Where a process may only have so much memory (`ulimit -v`, `LimitDATA=`, a kernel that does not
overcommit), any line of a program may raise MemoryError, also one that is halfway through somebody
else's answer. So whoever begins something asks here first, and is refused while there is too
little; and what is kept is given up when those who are under way need it. What is small may begin
with a part of that, so that a server whose memory large requests have taken still answers short
ones. Owns that memory. Must not know who asks.
"""

from __future__ import annotations

import mmap

from pageturner.errors import ClientError

KEPT = 48 << 20  # bytes of addresses; nothing is ever written there, so that they cost no memory
# bytes of these with which nothing is begun: they are for those who are under way alone
LEFT = 32 << 20
SMALL = 64 * 1024  # bytes of what may begin with the others
# bytes that those who are under way find at any moment, or what is kept is given up. More than
# anything takes between two looks: MemoryError is not enough, for some libraries in C do not
# survive a lack of memory
ALWAYS = 16 << 20
COPIES = 4  # of a body, from its bytes on the way to what was understood of it
OUT_OF_MEMORY = "out_of_memory"
MESSAGE = "the server has too little memory at the moment: ask again"


def out_of_memory() -> ClientError:
    """A refusal that may be sent again."""
    return ClientError(503, OUT_OF_MEMORY, MESSAGE, retry_after=1.0)


class MemoryReserve:
    """Single-threaded."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = _mapped(KEPT)

    @property
    def held(self) -> bool:
        """Return whether the reserve is held. While it is given up, requests that can be retried
        should make room."""
        return self._kept is not None

    def allows(self, size: int) -> bool:
        """Return whether something may begin, or go on, of which so many bytes are there or will
        be."""
        found = _mapped(COPIES * size + ALWAYS + (0 if self.held else KEPT))
        if found is None:
            return size <= SMALL and self._allows_small(size)
        found.close()
        if self._kept is None:
            self._kept = _mapped(KEPT)
        return self.held

    def _allows_small(self, size: int) -> bool:
        """Return whether something may begin with what is kept, which it finds given up then."""
        self.give_up()
        found = _mapped(COPIES * size + LEFT)
        if found is not None:
            found.close()
        return found is not None

    def give_way(self) -> bool:
        """Give up the reserve if running requests need the memory. Returns whether it is given up
        now."""
        try:
            mmap.mmap(-1, ALWAYS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            self.give_up()
        return self._kept is None

    def give_up(self) -> None:
        """Give up the reserve. It is taken back at a later check, as soon as there is enough
        memory."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def _mapped(size: int) -> mmap.mmap | None:
    """So many bytes of memory of this process, as malloc would get them; None where there are not
    so many."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None
