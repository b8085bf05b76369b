"""The build backend: scikit-build-core, and a line every few seconds that says how far the compiler is.

pip keeps to itself what a build prints, so the lines go to the standard error of the program that called the build.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scikit_build_core import build as _scikit
from scikit_build_core.build import *  # noqa: F403  # the other hooks are its own

EVERY_S = 2.0
_DONE = re.compile(
    rb"\[ *(\d+)/(\d+)\] (?:Building CXX object .*?(\w+)\.c\w+|Linking)|\[ *(\d+)%\]"
)


def _outlet() -> int | None:
    """Standard error of the parent process; None where it cannot be written to without harm: what is
    added to a plain file would be overwritten by its owner."""
    path = f"/proc/{os.getppid()}/fd/2"
    try:
        outlet = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        if stat.S_ISREG(os.fstat(outlet).st_mode):
            with open(f"/proc/{os.getppid()}/fdinfo/2") as about:
                flags = next(int(line.split()[1], 8) for line in about if line.startswith("flags"))
            if not flags & os.O_APPEND:
                os.close(outlet)
                return None
        os.set_blocking(outlet, True)
    except (OSError, StopIteration):
        return None
    return outlet


class _Progress:
    """Says what was compiled, every few seconds."""

    def __init__(self, outlet: int) -> None:
        self._outlet = outlet
        self._begin = time.monotonic()
        self._text = "configuring the build"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def read(self, line: bytes) -> None:
        """Take note of a line of the build."""
        if found := _DONE.search(line):
            done, total, name, percent = (part and part.decode() for part in found.groups())
            self._text = f"compiling the kernels: {done} of {total}" + (f", {name}" if name else "")
            if percent:
                self._text = f"compiling the kernels: {percent}%"

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.say(f"{self._text} ({time.monotonic() - self._begin:.0f} s)")

    def say(self, text: str) -> None:
        begin, end = ("\r", "\033[K\n") if os.isatty(self._outlet) else ("", "\n")
        try:
            os.write(self._outlet, f"{begin}pageturner: {text}{end}".encode())
        except OSError:
            self._ended.set()

    def end(self, made: str) -> None:
        self._ended.set()
        self._thread.join()
        if "none-any" in made:
            self.say(
                "the kernels were not compiled; the numpy backend runs, hundreds of times slower"
            )
        else:
            self.say(f"compiled in {time.monotonic() - self._begin:.0f} s")


def _copy(source: int, target: int, progress: _Progress) -> None:
    with os.fdopen(source, "rb") as lines:
        for line in lines:
            progress.read(line)
            os.write(target, line)


@contextmanager
def _shown() -> Iterator[list[str]]:
    """Watch standard output while a build runs. The list is for the name of what was made."""
    made: list[str] = []
    outlet = _outlet()
    if outlet is None:
        yield made
        return
    progress = _Progress(outlet)
    sys.stdout.flush()
    own = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    source, sink = os.pipe()
    os.dup2(sink, 1)
    os.close(sink)
    reader = threading.Thread(target=_copy, args=(source, own, progress), daemon=True)
    reader.start()
    try:
        yield made
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        reader.join(5)
        progress.end("".join(made))


def build_wheel(*arguments: Any, **settings: Any) -> str:
    with _shown() as made:
        made.append(_scikit.build_wheel(*arguments, **settings))
    return made[0]


def build_editable(*arguments: Any, **settings: Any) -> str:
    with _shown() as made:
        made.append(_scikit.build_editable(*arguments, **settings))
    return made[0]
