"""Garbage collection of reference cycles: at moments of our choosing, and seldom for long.

A full collection walks every object of the process, and meanwhile nobody gets a token: with 2,000
connections that is 40 to 130 ms. Python begins one when the objects of its youngest generations
have grown by a quarter, which a step with 500 sequences does by itself in a second or three. Here
the youngest generation is larger than a step, and a full collection comes when its owner has a
moment, for at most SHARE of the time: soon again while it is quick, seldom where it is slow.

Must not know what makes garbage. Ground floor, standard library only.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable

SHARE = 1e-3  # of the time, for full collections
LEAST = 0.5  # seconds between two of them
WORTH = 700  # objects made and not freed since the last one; with fewer there is nothing to find
YOUNG = 20_000  # the same, until the youngest generation is walked: more than what a step makes and drops
# that many walks of the youngest until the middle one is walked, and of that until Python does by
# itself what its owner should have done
MIDDLE, OLDEST = 3, 100


class Collector:
    """Full collections of one process, within their share of the time.

    collect  collects; something else in tests
    clock    seconds
    """

    def __init__(
        self,
        collect: Callable[[], object] = gc.collect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collect = collect
        self._clock = clock
        self._next = clock() + LEAST

    def take_over(self) -> None:
        """Take over the full collections of this process: from here on `look` runs them. Objects
        that exist now, from its start, live for ever and are never walked."""
        gc.freeze()
        atexit.register(gc.unfreeze)  # else native objects are reported as leaked at the end
        gc.set_threshold(YOUNG, MIDDLE, OLDEST)

    def look(self) -> None:
        """Collect if it is time. To be called now and then, when nobody waits."""
        now = self._clock()
        if now < self._next:
            return
        young, middle, old = gc.get_count()
        if young < WORTH and not middle and not old:
            return
        self._collect()
        end = self._clock()
        self._next = end + max(LEAST, (end - now) / SHARE)
