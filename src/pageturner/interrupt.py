"""The ways in which a process is ended from outside: by Ctrl-C while kernels compute, and together
with its parent.

Python sees Ctrl-C only when kernels return, seconds later where a step is large. Owns the thread
that sees it at once, and how long the step may still take. Must not know what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE = 1.0  # seconds for the step to end by itself
INTERRUPTED = 130  # exit code
PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextlib.contextmanager
def leaving_at_once(folders: Sequence[Path]) -> Iterator[None]:
    """Within this Ctrl-C ends the process, in the middle of a step if it must. folders: removed
    before that. Only for the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if signal.SIGINT in os.read(reader, 64) and not over.wait(PATIENCE):
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                os._exit(INTERRUPTED)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        watcher.join()
        os.close(reader)
        os.close(writer)


def end_with_parent() -> None:
    """Have the kernel kill this process when the API process dies, even while this one is stopped
    and cannot see its channel close. This is tied to the thread that forked, which is the main
    thread of the server. An API process that had died before is seen by the closed channel; one
    that dies meanwhile, by its id."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
