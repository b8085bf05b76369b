"""One engine process and what is shared with it: its end of a socket pair, its ledger, the memory
of its KV.

Owns file descriptors and the child. Must not know requests. Imports little: the server starts the
engine before it imports anything that it needs for itself.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.config.settings import EngineConfig
from pageturner.ipc.ledger import Ledger

if TYPE_CHECKING:
    import asyncio

BUFFER_BYTES = 4 << 20  # of the socket, so that an engine seldom waits for the API process
MAX_SAMPLES = 4096  # of how long an engine was kept from running: more than ten minutes of them


def engine_command(config: EngineConfig) -> list[str]:
    """Return how the engine process is started, by module name: this process never imports it."""
    settings = json.dumps(asdict(config))
    return [sys.executable, "-m", "pageturner.engine.worker", "--config", settings]


def on_device(command: list[str], device: str) -> list[str]:
    """The command for an engine process on the device of one that was ready, as `Ready` tells it
    ("cuda (why)"): the device is chosen once in the life of a server. "": an engine that has
    none."""
    if not device or "--device" in command:
        return command
    return [*command, "--device", device.partition(" ")[0]]


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches the whole process group: the engine has to ignore it from its first
    instruction on. Only the main thread can see to that; a server inside of another program is in
    no terminal's group."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class KVMemory:
    """Memory for KV that outlives engine processes: a file without a name, which the first of them
    gives its size. It goes with this object, and with this process."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pageturner-kv")
        weakref.finalize(self, os.close, self.fd)

    def discard(self) -> None:
        """Give up what is in it. Nobody may have mapped it."""
        os.ftruncate(self.fd, 0)


def run_delays(pid: int) -> dict[str, int]:
    """Return for each thread of a process and its children (ranks, stages) for how many nanoseconds it was ready to
    run and did not; nothing where the kernel does not tell."""
    found = {}
    waiting = [str(pid)]
    for process in waiting:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                folder = f"/proc/{process}/task/{thread}"
                with contextlib.suppress(OSError, ValueError):  # it ends just now
                    with open(f"{folder}/schedstat") as file:
                        _, waited, _ = file.read().split()
                    found[thread] = int(waited)
                    with open(f"{folder}/children") as file:
                        waiting += file.read().split()
    return found


class RunDelay:
    """It tells how long others on the machine kept a process from running, by samples of the thread that waited
    longest. A thread that hangs or is stopped does not wait for a processor."""

    def __init__(self, read: Callable[[], dict[str, int]]) -> None:
        self._read = read
        self._threads: dict[str, int] = {}
        self._times: list[float] = []  # of the samples
        self._totals: list[float] = []  # seconds, until each sample

    def sample(self, now: float) -> None:
        threads = self._read()
        delays = [delay - self._threads.get(thread, 0) for thread, delay in threads.items()]
        before = self._totals[-1] if self._totals else 0.0
        self._threads = threads
        self._times.append(now)
        self._totals.append(before + max(delays, default=0) / 1e9)
        del self._times[:-MAX_SAMPLES], self._totals[:-MAX_SAMPLES]

    def since(self, then: float) -> float:
        """Return the seconds of it between the first sample behind `then` and the last one."""
        first = bisect.bisect_left(self._times, then)
        if first == len(self._times):
            return 0.0
        return self._totals[-1] - self._totals[first]


class EngineProcess:
    """A started engine process. `ledger` stays readable after its death, and so does what is in
    `kv`. It dies with the thread that starts it (worker.py): one that lasts.

    kv  of the process before, which is dead; None: new memory
    """

    def __init__(self, command: list[str], kv: KVMemory | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        for end in (self.sock, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.sock.setblocking(False)
        self.ledger, ledger_fd = Ledger.create()
        self.kv = kv or KVMemory()
        names = ("--channel-fd", "--ledger-fd", "--kv-fd")
        fds = (theirs.fileno(), ledger_fd, self.kv.fd)
        given = [word for name, fd in zip(names, fds, strict=True) for word in (name, str(fd))]
        try:
            with _interrupts_ignored():
                self._child = subprocess.Popen(
                    [*command, *given], stdin=subprocess.DEVNULL, pass_fds=fds
                )
        finally:
            theirs.close()
            os.close(ledger_fd)
        self.pid = self._child.pid
        self.run_delay = RunDelay(functools.partial(run_delays, self.pid))
        self._outgoing = bytearray()

    def send(self, frame: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Send a frame, whatever of it the engine does not take yet as soon as it does. To one that
        is dead nothing is sent: whoever reads from it sees that, and everything is submitted
        again."""
        if not self._outgoing:
            try:
                sent = self.sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent == len(frame):
                return
            frame = frame[sent:]
            loop.add_writer(self.sock, self._flush, loop)
        self._outgoing += frame

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            del self._outgoing[: self.sock.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()
        if not self._outgoing:
            loop.remove_writer(self.sock)

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process lives, negative for the signal that ended
        it."""
        return self._child.poll()

    @property
    def stopped(self) -> bool:
        """Return whether the process is stopped (SIGSTOP, a debugger), which no request can
        cause."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] in b"Tt"
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL, which a stopped process obeys too."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        return self._child.wait(timeout)
