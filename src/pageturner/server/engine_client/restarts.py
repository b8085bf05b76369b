"""The count of how often in a row an engine was started again for nothing, and what follows from
it.

Owns the pauses between two starts, the patience of those who wait and what they are told. Must not
know processes, requests or whose fault it was.

A restart is futile if since the one before no stream gained a token, nobody was found to be the
culprit and the engine did not live for STEADY seconds. The first start follows at once, those after
it after 0.1 s, 0.2 s and so on to MAX_BACKOFF, for ever: what keeps an engine from starting may
end, such as a lack of memory. More than `patience` futile restarts in a row are a crash loop:
whoever waits is told so, and may ask again later.
"""

from __future__ import annotations

import logging

from pageturner.errors import ClientError
from pageturner.request import Failure

log = logging.getLogger("pageturner")

MAX_BACKOFF = 5.0  # seconds between two starts
STEADY = 10.0  # seconds that an engine must live to be no part of a crash loop
START_TIMEOUT = 600.0  # seconds that the first engine may take to load its model
SLOWER = 10.0  # times as long as the first one the others may take, until they are taken to hang
GAVE_UP = Failure("engine_gave_up", "the engine could not be started; the server is going down")
UNAVAILABLE = Failure(
    "engine_unavailable",
    "the engine ends again and again without getting anywhere; it is being restarted: try again later",
    MAX_BACKOFF,
)
DEVICE_UNAVAILABLE = Failure(
    "device_unavailable",
    "the GPU that this server computes on cannot be used; the engine is started on it again: try again later",
    MAX_BACKOFF,
)


class Restarts:
    """patience: futile restarts in a row for which open requests wait; futile: those so far;
    start_failed: the code with which the last engine could not start."""

    def __init__(self, patience: int) -> None:
        self.futile = 0
        self.start_failed = ""
        self._patience = patience
        self._first: float | None = None  # seconds that the first start took

    def lost(self, progress: bool) -> None:
        """An engine has ended. progress: whether anything came of it."""
        self.futile = 0 if progress else self.futile + 1

    def could_not_start(self, code: str, reason: str) -> None:
        """An engine has said so of itself."""
        self.start_failed = code
        log.error("the next engine cannot start (%s): %s", code, reason)

    def started(self, seconds: float) -> None:
        """An engine was ready so many seconds after its start."""
        self.start_failed = ""
        if self._first is None:
            self._first = seconds

    def start_timeout(self, least: float) -> float:
        """Seconds that the next start may take: one that hangs should not be waited for as long as
        one that loads a model for the first time. More with each futile one, in case the machine
        has become slow."""
        if self._first is None:
            return START_TIMEOUT
        return min(max(SLOWER * self._first, least) * 2.0 ** min(self.futile, 16), START_TIMEOUT)

    @property
    def looping(self) -> bool:
        """Return whether this is a crash loop, as long as the present engine does not show that it
        is over."""
        return self.futile > self._patience

    @property
    def unavailable(self) -> Failure:
        """Return the failure that waiting requests get in a crash loop."""
        return DEVICE_UNAVAILABLE if self.start_failed.startswith("gpu_") else UNAVAILABLE

    def refuse_in_a_loop(self) -> None:
        """ClientError 503 in a crash loop."""
        if self.looping:
            why = self.unavailable
            raise ClientError(503, why.code, why.message, retry_after=why.retry_after)

    @property
    def pause(self) -> float:
        """Seconds until the next start."""
        return min(0.1 * 2 ** (min(self.futile, 32) - 2), MAX_BACKOFF) if self.futile > 1 else 0.0
