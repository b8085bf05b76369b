"""What goes wrong in the chaos: each kind of fault as a function of a server. Faults are real signals, limits
and requests. Must not know whose answers are compared, nor how.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_jobs
import harness
from chaos_jobs import Job
from dialect_jobs import ENGINE_TIMEOUT
from harness import Server

from pageturner.ipc.ledger import Ledger

WORKERS = "pageturner-text"  # what the fork server and the text workers are called
ROOM = (0, 8, 24, 48)  # MB that the API process may grow by while it has too little memory
PRESSED = 2.5  # seconds
SPACE = 4096  # bytes that the disk of the step log has left
REPLACED = 20.0  # seconds until there must be another engine
HOSTILE = "word " * 700_000


class Faults:
    """dice: when in a fault what happens. log: the step log of the server. pressed: what was answered to
    those who took the memory."""

    def __init__(self, server: Server, dice: random.Random, log: Path) -> None:
        self._server = server
        self._dice = dice
        self._log = log
        self.pressed: list[str] = []
        self._turns: Counter[str] = Counter()

    def kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "kill": lambda: self._signal(signal.SIGKILL),
            "two kills": self._two_kills,
            "kill while loading": lambda: self._signal(signal.SIGKILL, self._next_engine()),
            "stop": self._stop,
            "stop while loading": lambda: self._signal(signal.SIGSTOP, self._next_engine()),
            "late return": self._late_return,
            "API process stopped": self._stop_server,
            "segfault": lambda: self._inject("segfault", self._dice.randrange(2, 6)),
            "poison": lambda: self._inject("segfault", 1),
            "exception": lambda: self._inject("exception", self._dice.randrange(1, 6)),
            "hang": lambda: self._inject("hang", self._dice.randrange(1, 6)),
            "hostile text": self._hostile_text,
            "text worker": self._kill_text_worker,
            "fork server": lambda: os.kill(self._fork_server(), signal.SIGKILL),
            "memory": self._press,
            "full disk": self._fill_disk,
        }

    # -- engines ---------------------------------------------------------------------------------------------
    def _engine(self) -> int:
        """The engine process, once there is one."""
        return _soon(self._server.engine_pid)

    def _signal(self, number: int, pid: int = 0) -> None:
        os.kill(pid or self._engine(), number)

    def _stop(self) -> None:
        """By turns in a step and between two, where it listens to the API process."""
        self._turns["stop"] += 1
        pid = self._engine()
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + REPLACED
        ledger = _ledger_of(pid)
        while time.monotonic() < until:
            begun, finished, *_ = ledger.read()
            if (begun == finished) == (self._turns["stop"] % 2 == 0):
                return
            os.kill(pid, signal.SIGCONT)
            time.sleep(self._dice.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGSTOP)

    def _next_engine(self) -> int:
        """Kill the engine; the process that is started in its place, which has not loaded yet."""
        old = self._engine()
        os.kill(old, signal.SIGKILL)

        def another() -> int:
            pid = self._server.engine_pid()
            if pid == old:
                raise RuntimeError("not yet")
            return pid

        return _soon(another)

    def _two_kills(self) -> None:
        """The second one while it takes back KV, or is about to."""
        pid = self._next_engine()
        time.sleep(self._dice.uniform(0.1, 1.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _late_return(self) -> None:
        """An engine that goes on about when the server gives it up."""
        pid = self._engine()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.8, 1.3) * ENGINE_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _inject(self, kind: str, token: int) -> None:
        self._behind(
            "/v1/completions", {"prompt": "x", "max_tokens": 8, "inject_fault": f"{kind}@{token}"}
        )

    def _fill_disk(self) -> None:
        """For the engine that is there now: the disk of the next one has room again."""
        pid = self._engine()
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._log.stat().st_size + SPACE, hard))

    # -- the API process and its workers ---------------------------------------------------------------------
    def _stop_server(self) -> None:
        pid = self._server.process.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.25 * ENGINE_TIMEOUT)
        os.kill(pid, signal.SIGCONT)

    def _hostile_text(self) -> None:
        self._turns["hostile text"] += 1
        if self._turns["hostile text"] % 2:
            return self._behind("/v1/completions", {"prompt": HOSTILE, "max_tokens": 8})
        patterns = {f"^[a-z]*{i}[a-z]*$": {"type": "string"} for i in range(800)}
        schema = {"type": "object", "patternProperties": patterns}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        self._behind("/v1/completions", {"prompt": "x", "response_format": form})

    def _fork_server(self) -> int:
        return _soon(lambda: next(_children(self._server.process.pid, WORKERS)))

    def _kill_text_worker(self) -> None:
        """One that has something to do."""
        self._behind("/tokenize", {"prompt": HOSTILE[:900_000]})
        os.kill(_soon(lambda: next(_children(self._fork_server(), WORKERS))), signal.SIGKILL)

    def _press(self) -> None:
        """The API process may hardly grow any more while much is asked of it, some of that before."""
        pid = self._server.process.pid
        threads = [self._greedy(path, body) for path, body in _GREEDY]
        time.sleep(self._dice.uniform(0.0, 0.6))
        status = Path(f"/proc/{pid}/status").read_text()
        has = 1024 * int(
            next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]
        )
        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (has + (self._dice.choice(ROOM) << 20), hard))
        try:
            threads += [self._greedy(path, body) for path, body in _GREEDY * 2]
            time.sleep(PRESSED)
        finally:
            for one in (pid, *_children(pid, "")):  # who was started meanwhile has the same limit
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(one, resource.RLIMIT_DATA, (soft, hard))
        for thread in threads:
            thread.join(60)

    # -- requests --------------------------------------------------------------------------------------------
    def _behind(self, path: str, body: dict[str, object]) -> None:
        """Ask for something whose answer nobody waits for."""
        threading.Thread(
            target=chaos_jobs.ask, args=(self._server.url, Job("", path, body)), daemon=True
        ).start()

    def _greedy(self, path: str, body: dict[str, object]) -> threading.Thread:
        def work() -> None:
            status, data = 0, b""
            with contextlib.suppress(OSError, chaos_jobs.http.client.HTTPException):
                status, data = chaos_jobs.post(self._server.url, Job("", path, body))
            reason = data.partition(b'"reason":"')[2].partition(b'"')[0].decode()
            self.pressed.append(f"{status} {reason}".strip())

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


_GREEDY: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": HOSTILE, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [7] * 600, "prompt_logprobs": 20, "max_tokens": 1}),
    ("/tokenize", {"prompt": HOSTILE[:1_000_000], "return_token_strs": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}] * 2000, "max_tokens": 2},
    ),
]


def _soon(find: Callable[[], int]) -> int:
    until = time.monotonic() + REPLACED
    while True:
        try:
            return find()
        except (RuntimeError, OSError, StopIteration):
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def _ledger_of(pid: int) -> Ledger:
    """What an engine says that it is doing."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "pageturner-ledger" in os.readlink(link):
            fd = os.open(link, os.O_RDWR)
            try:
                return Ledger(fd)
            finally:
                os.close(fd)
    raise RuntimeError("the engine has no ledger")


def _children(pid: int, name: str) -> Iterator[int]:
    """The child processes of this name, or all."""
    for child in harness.children(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == name or not name:
                yield child
