"""One line of progress on a terminal, and elsewhere a line now and then where that is wanted.

Ground floor, standard library only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

REDRAW_EVERY = 0.1  # seconds


class Progress:
    """A line that is redrawn in place: `with Progress("generating", total) as p: p.update(done,
    "note")`. total: may change, where it is not known yet. Work that ends before it leaves a full
    bar. lines: seconds from one line to the next where there is no terminal; 0: none there.
    enabled: whether there is one, and nothing is said without; None: look."""

    def __init__(
        self, what: str, total: int, *, enabled: bool | None = None, lines: float = 0.0
    ) -> None:
        self._what = what
        self.total = total
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._next = 0.0
        self._begin = time.monotonic()
        self._last: tuple[int, str] | None = None
        self._lines = lines if enabled is None and not self._enabled else 0.0
        self._next_line = self._begin + lines

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        if kind is None and self._last is not None:
            self.total, note = self._last
            self.update(self.total, note)
        print(file=sys.stderr)

    def update(self, done: int, note: str = "") -> None:
        """Show `done` of the total, with a short note behind it."""
        now, self._last = time.monotonic(), (done, note)
        if self._lines and now >= self._next_line:
            self._next_line = now + self._lines
            seconds = now - self._begin
            said = f"{self._what}: {done:,} of {self.total:,} after {seconds:.0f} s{note and ', '}{note}"
            print(said, file=sys.stderr, flush=True)
        if not self._enabled or (now < self._next and done < self.total):
            return
        self._next = now + REDRAW_EVERY
        share = done / self.total if self.total else 1.0
        bar = "#" * int(30 * share)
        elapsed = now - self._begin
        line = f"{self._what} [{bar:<30}] {done}/{self.total} {elapsed:.0f}s {note}"
        print(f"\r{line:<79.79}", end="", file=sys.stderr, flush=True)
