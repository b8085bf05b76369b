"""Ctrl-C while kernels compute: Python sees it only when they return, seconds later where a step is large.

Owns the thread that sees it at once, and how long the step may still take. Must not know what is computed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE = 1.0  # seconds for the step to end by itself
INTERRUPTED = 130  # exit code


@contextlib.contextmanager
def leaving_at_once(folders: Sequence[Path]) -> Iterator[None]:
    """Within this Ctrl-C ends the process, in the middle of a step if it must. folders: removed before
    that. Only for the main thread."""
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
