"""An event loop that outlives a lack of memory.

asyncio hands what a callback raises to a handler that writes it to the log, and ends when this, or
its own housekeeping, finds no memory either. Nothing is lost by going on: sockets are ready until
they are read, and callbacks that were not reached are called in the next round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PAUSE = 0.01  # seconds


class EnduringLoop(asyncio.SelectorEventLoop):
    """out_of_memory: called in each round that found none; must not need any."""

    def __init__(self, out_of_memory: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._out_of_memory = out_of_memory

    def run_forever(self) -> None:
        while True:
            try:
                return super().run_forever()
            except MemoryError:
                self._endure()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """The same as asyncio's, but for a lack of memory, about which a traceback says nothing."""
        if isinstance(context.get("exception"), MemoryError):
            self._endure()
        else:
            super().call_exception_handler(context)

    def _endure(self) -> None:
        if self._out_of_memory is not None:
            self._out_of_memory()
        time.sleep(PAUSE)
