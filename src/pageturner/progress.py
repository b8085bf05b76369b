"""Progress on standard error: a bar on a terminal, and elsewhere a line every few seconds.

Ground floor.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from pageturner import logs

REDRAW_EVERY = 0.1  # seconds
LINE_EVERY = 3.0  # seconds, where there is no terminal
NEVER = 1e6  # seconds


class Still:
    """Says every few seconds what is going on, until `end`. text: asked each time. Of several, one
    within another, the innermost is heard. Work that ends sooner leaves no line."""

    def __init__(self, text: Callable[[], str], every: float = LINE_EVERY) -> None:
        self.text = text
        self.every = every
        self.begin = time.monotonic()
        _voice.add(self)

    def end(self, *_: object) -> None:
        _voice.remove(self)

    def __enter__(self) -> None: ...

    __exit__ = end


class _Voice:
    """The thread that speaks for every `Still`. There is none where nothing is to be said."""

    def __init__(self) -> None:
        self._works: list[Still] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: Still) -> None:
        with self._changed:
            self._works.append(work)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def remove(self, work: Still) -> None:
        ended = None
        with self._changed:
            self._works = [one for one in self._works if one is not work]
            self._changed.notify_all()
            if not self._works:
                ended, self._thread = self._thread, None
        if ended is not None:
            ended.join()

    def text(self) -> str:
        with self._changed:
            return self._works[-1].text() if self._works else ""

    def _run(self) -> None:
        spoken = time.monotonic()
        with self._changed:
            while self._thread is threading.current_thread():
                work, now = self._works[-1], time.monotonic()
                if now < spoken + work.every:
                    self._changed.wait(spoken + work.every - now)
                    continue
                spoken = now
                logs.say(f"{work.text()} ({now - work.begin:.0f} s)")


_voice = _Voice()


def doing() -> str:
    """Return what the innermost work says of itself; "" where there is none."""
    return _voice.text()


class Progress:
    """`with Progress("generating", total) as p: p.update(done, "note")`. total: may change, where
    it is not known yet. Work that ends before it leaves a full bar. enabled: whether there is a
    terminal, and nothing is said without; None: look."""

    def __init__(self, what: str, total: int, *, enabled: bool | None = None) -> None:
        self._what = what
        self.total = total
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._next = 0.0
        self._begin = time.monotonic()
        self._last: tuple[int, str] | None = None
        self._still = None
        if enabled is None:  # a bar on a terminal says it itself
            self._still = Still(self._line, NEVER if self._enabled else LINE_EVERY)

    def __enter__(self) -> Progress:
        return self

    def _line(self) -> str:
        done, note = self._last or (0, "")
        return f"{self._what}: {done:,} of {self.total:,}{note and ', '}{note}"

    def __exit__(self, kind: object, *_: object) -> None:
        if self._still is not None:
            self._still.end()
        if not self._enabled:
            return
        if kind is None and self._last is not None:
            self.total, note = self._last
            self.update(self.total, note)
        print(file=sys.stderr)

    def update(self, done: int, note: str = "") -> None:
        """Show `done` of the total, with a short note behind it."""
        now, self._last = time.monotonic(), (done, note)
        if not self._enabled or (now < self._next and done < self.total):
            return
        self._next = now + REDRAW_EVERY
        share = done / self.total if self.total else 1.0
        bar = "#" * int(30 * share)
        elapsed = now - self._begin
        line = f"{self._what} [{bar:<30}] {done}/{self.total} {elapsed:.0f}s {note}"
        print(f"\r{line:<79.79}", end="", file=sys.stderr, flush=True)
