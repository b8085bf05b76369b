"""A real server of a model, in a process of its own, on loopback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[httpx.Client]:
    """A client of it. It must end by itself, and well, when it is told to."""
    command = [sys.executable, "-m", "pageturner", "serve", str(model), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = ""
        while "listening on" not in line:
            line = process.stderr.readline()
            assert line, "the server did not start"
        url = line.split("listening on ")[1].split(";")[0]
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            try:
                yield client
            except BaseException:  # of the test, which is to fail at once
                process.kill()
                raise
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        drain.wait(60)
