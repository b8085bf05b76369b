"""A process that is told to stop ends in time, whatever its threads still do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from .conftest import Server

PROGRAM = """
import asyncio, logging, sys, time
from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.http import lifecycle

async def main():
    logs.to_stderr("info")
    asyncio.ensure_future(asyncio.to_thread(time.sleep, 3600))
    await asyncio.sleep(0.1)
    logging.getLogger("pageturner").info("last words")
    {end}

try:
    sys.exit(lifecycle.run(main()))
except EngineFault as fault:
    print(fault.message, file=sys.stderr)
    sys.exit(1)
"""


def test_sighup_ends_nobody(start: Callable[..., Server]) -> None:
    """Whether there is anything to read again or not."""
    server = start()
    router = start(server.url, command="route")
    for one in (server, router):
        one.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert one.http.get("/health").status_code == 200
        assert one.process.poll() is None


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return 0", 0, "last words"),
        ("return 3", 3, "last words"),
        ("raise EngineFault('x', 'broken')", 1, "broken"),
    ],
)
def test_nobody_waits_for_a_thread_that_works(end: str, code: int, said: str) -> None:
    """asyncio and the interpreter would, for an hour."""
    program = [sys.executable, "-c", PROGRAM.replace("{end}", end)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert said in done.stderr


BLOCKED = """
import asyncio, sys
from types import SimpleNamespace
from pageturner.http import lifecycle

async def main():
    program = SimpleNamespace(draining=False, active=0)
    lifecycle.drain_on_signals(program, float(sys.argv[1]) - lifecycle.MARGIN)
    print("ready", flush=True)
    while True:
        pass

lifecycle.run(main())
"""


@pytest.mark.parametrize(
    ("seconds", "signals", "code"), [("3600", 2, 128 + signal.SIGTERM), ("0.2", 1, 1)]
)
def test_a_loop_that_stands_still_can_be_ended(seconds: str, signals: int, code: int) -> None:
    program = [sys.executable, "-c", BLOCKED, seconds]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        try:
            assert process.wait(30) == code
        finally:
            process.kill()


def test_sigterm_to_the_whole_group_is_no_lost_engine(start: Callable[..., Server]) -> None:
    server = start()
    server.process.send_signal(signal.SIGTERM)
    os.kill(server.engine_pid(), signal.SIGTERM)
    log = server.finished()
    assert "stopped; answers cut off: 0" in log
    assert "is lost" not in log
    assert len(server.notes("start")) == 1


def test_a_server_says_that_it_is_loading(start: Callable[..., Server]) -> None:
    lines = start().log.splitlines()
    assert "loading" in lines[0]
    assert any("listening on" in line for line in lines[1:])


@pytest.mark.slow
def test_sigterm_with_a_text_worker_at_work_ends_a_server(start: Callable[..., Server]) -> None:
    server = start("--shutdown-timeout", "0.2", FAKE_TOKENIZE_SECONDS="3600")
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/tokenize", json={"prompt": "hello" * 2000}, timeout=0.3)
    assert server.stop() == 0
