"""The server of tests/serve, for commands that ask one; and a terminal to type into."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pageturner import progress
from server.conftest import Server, _end

# a session leader that opens a terminal gets it as its own: Ctrl-C then reaches it as SIGINT, which a shell's
# background jobs inherit as ignored
LAUNCH = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
os.open(os.ttyname(0), os.O_RDWR)
from pageturner import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder of its own: what a command writes by default (compare.html,
    pageturner.toml) neither lies about in the repository nor is taken for what another test wrote."""
    folder = tmp_path / "working-directory"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(progress, "LINE_EVERY", progress.NEVER)  # however busy the machine is
    return folder


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with the fake engine."""
    server = Server(tmp_path_factory.mktemp("server"), [], {}, True)
    yield server
    _end(server)


class Terminal:
    """A program in a terminal of its own. `screen` is what it showed so far."""

    def __init__(self, words: list[str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a text; what was shown up to it is taken off the screen and returned."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, (
                f"waited in vain for {text!r}; the screen: {self.screen!r}"
            )
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the program has ended, and with it the terminal
                    assert text in self.screen, (
                        f"ended without {text!r}; the screen: {self.screen!r}"
                    )
        shown, _, self.screen = self.screen.partition(text)
        return shown + text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """terminal("chat", ...) -> the program, in a terminal."""
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        opened.append(Terminal(list(words)))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Flags that run a tiny model in this process."""
    golden = Path(__file__).parent.parent / "goldens" / "tiny_llama.gguf"
    return [str(golden), "--backend", "reference"]
