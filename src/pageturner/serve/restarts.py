"""How often in a row an engine was started again for nothing, and what follows from it.

Owns the pauses between two starts and the patience of those who wait. Pure data. Must not know processes,
requests or whose fault it was.

A restart is futile if since the one before no stream gained a token, nobody was found to be the culprit and
the engine did not live for STEADY seconds. The first start follows at once, those after it after 0.1 s, 0.2 s
and so on to MAX_BACKOFF, for ever: what keeps an engine from starting may end, such as a lack of memory. More
than `patience` futile restarts in a row are a crash loop: whoever waits is told so, and may ask again later.
"""

from __future__ import annotations

MAX_BACKOFF = 5.0  # seconds between two starts
STEADY = 10.0  # seconds that an engine must live to be no part of a crash loop


class Restarts:
    """patience: futile restarts in a row for which open requests wait; futile: those so far."""

    def __init__(self, patience: int) -> None:
        self.futile = 0
        self._patience = patience

    def lost(self, progress: bool) -> None:
        """An engine has ended. progress: whether anything came of it."""
        self.futile = 0 if progress else self.futile + 1

    @property
    def looping(self) -> bool:
        """Whether this is a crash loop, as long as the present engine does not show that it is over."""
        return self.futile > self._patience

    @property
    def pause(self) -> float:
        """Seconds until the next start."""
        return min(0.1 * 2 ** (min(self.futile, 32) - 2), MAX_BACKOFF) if self.futile > 1 else 0.0
