"""One line of progress on a terminal, nothing anywhere else. Ground floor, standard library only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

REDRAW_EVERY = 0.1  # seconds


class Progress:
    """A line that is redrawn in place: `with Progress("generating", total) as p: p.update(done, "note")`.
    total: may change, where it is not known yet."""

    def __init__(self, what: str, total: int, *, enabled: bool | None = None) -> None:
        self._what = what
        self.total = total
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._next = 0.0
        self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            print(file=sys.stderr)

    def update(self, done: int, note: str = "") -> None:
        """Show `done` of the total, with a short note behind it."""
        now = time.monotonic()
        if not self._enabled or (now < self._next and done < self.total):
            return
        self._next = now + REDRAW_EVERY
        share = done / self.total if self.total else 1.0
        bar = "#" * int(30 * share)
        elapsed = now - self._begin
        line = f"{self._what} [{bar:<30}] {done}/{self.total} {elapsed:.0f}s {note}"
        print(f"\r{line:<79.79}", end="", file=sys.stderr, flush=True)
