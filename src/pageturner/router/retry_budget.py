"""The number of requests that a router may try again: where much fails, retries must not multiply
the load.

Owns the counts of the last seconds: pure data, and a clock that it is given. Must not know
requests, nor what went wrong with them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW = 10  # seconds
LEAST = 10  # retries a second that may always be, so that few requests are tried again too


class RetryBudget:
    """Retries in a window are at most LEAST for each of its seconds, and so large a share of its
    requests.

    share    retries for each request
    withheld  how often there was none left
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.withheld = 0
        self._share = share
        self._clock = clock
        # of the window: which one, its requests, its retries
        self._seconds: deque[list[int]] = deque()

    def request(self) -> None:
        """Count a request."""
        self._now()[1] += 1

    def take(self) -> bool:
        """Return whether another retry is allowed, and count it if so."""
        second = self._now()
        requests, retries = (sum(one[i] for one in self._seconds) for i in (1, 2))
        if retries + 1 > WINDOW * LEAST + self._share * requests:
            self.withheld += 1
            return False
        second[2] += 1
        return True

    def _now(self) -> list[int]:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        while self._seconds[0][0] <= now - WINDOW:
            self._seconds.popleft()
        return self._seconds[-1]
