"""A real server process with the fake engine, over loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.hf_folder import GOLDENS
from support.servers import serving


class Server:
    """One server process. `log` is what it wrote to standard error so far."""

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        env: dict[str, str],
        wait: bool,
        command: str = "serve",
    ) -> None:
        self.notes_path = folder / "notes.jsonl"
        self.notes_path.touch()
        fake = [str(Path(__file__).with_name("fake_server.py"))]
        program = fake if command == "serve" else ["-m", "pageturner", command]
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", "0", *flags],
            env={**os.environ, "FAKE_LOG": str(self.notes_path), **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.until(
                lambda: (
                    re.search(r"listening on (\S+);", self.log) or self.process.poll() is not None
                )
            )
            found = re.search(r"listening on (\S+);", self.log)
            assert found, self.log
            self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Wait until the condition holds."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain; the server said:\n{self.log}"
            time.sleep(0.01)
        return found

    def notes(self, key: str) -> list[dict[str, Any]]:
        """What the fake engines noted under a key: submit, abort, start."""
        # what follows is still being written
        whole, _, _ = self.notes_path.read_text().rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return [line for line in lines if key in line]

    def engine_pid(self) -> int:
        return int(self.notes("start")[-1]["pid"])

    def hold(self, tokens: int) -> None:
        """Let no answer get more tokens than so many; 0: let all go on. To be called before the
        answers are asked for: on a busy machine they could else end first."""
        path = self.notes_path.with_name(f"{self.notes_path.name}.hold")
        path.write_text(f"{tokens}") if tokens else path.unlink()
        self.held = tokens

    def kill_when_held(self, requests: int, then: int = 0, sign: int = signal.SIGKILL) -> None:
        """Kill the engine when so many answers stand where they are held, then hold at `then`."""
        pid = self.engine_pid()
        wanted = {"pid": pid, "held": self.held, "requests": requests}
        self.until(lambda: wanted in self.notes("held"))
        os.kill(pid, sign)
        self.hold(then)

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        text = self.http.get("/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def finished(self) -> str:
        """Everything it wrote, once it has ended."""
        self.process.wait(20)
        self._reader.join(30)
        return self.log


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """start(*flags, **environment) -> a server of this test's own. command: another one that listens."""
    servers: list[Server] = []

    def begin(*flags: str, wait: bool = True, command: str = "serve", **env: str) -> Server:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(Server(folder, list(flags), env, wait, command))
        return servers[-1]

    yield begin
    for server in servers:
        _end(server)


def shared(scope: Any = "module", flags: tuple[str, ...] = (), **env: str) -> Any:
    """A fixture: a server that tests share. They must leave it as it was."""

    @pytest.fixture(scope=scope)
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        server = Server(tmp_path_factory.mktemp("server"), list(flags), env, True)
        yield server
        _end(server)

    return server


server = shared("session")


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    """A client of a tiny model's server, whose calls and thoughts have formats: tests share it."""
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--developer")
    with serving(GOLDENS / "tiny_llama.gguf", *flags) as one:
        yield one


def _end(server: Server) -> None:
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait(60)
    server.http.close()
    assert server.process.stderr is not None
    server._reader.join(30)
    server.process.stderr.close()


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each says its kind twice."""
    found = []
    text = response.text.replace(": keep-alive\n\n", "")
    for block in text.removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        found.append(event)
    return found
