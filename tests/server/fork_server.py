"""A process that has imported what a server needs, and forks one for every start that it is asked for: tests start
servers by the hundred, and most of what a start costs is its imports. `Forked` is such a server; run as a program,
the module is the process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any


class Forked:
    """A server that was forked, with what tests use of subprocess.Popen."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        read, write = os.pipe()
        self._reports, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        asked = json.dumps([words, env]).encode()
        socket.send_fds(_mother()[0], [asked], [write, theirs.fileno()])
        os.close(write)
        theirs.close()
        self.stderr = open(read)  # noqa: SIM115
        self.pid = int(self._reports.recv(99))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reports.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._reports.recv(99)))
            self._reports.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except BlockingIOError:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _mother() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's fork server, which ends when its socket is closed."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen([sys.executable, __file__], stdin=theirs)


def forked() -> Any:
    """Fork for each start; only the server that was forked returns, with what it shall be."""
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asked, files, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not asked:
            os._exit(0)
        if os.fork() == 0 and _reported(*files):
            return json.loads(asked)
        for file in files:
            os.close(file)


def _reported(log: int, reports: int) -> bool:
    """Fork the server, and tell its id and how it ends; True in the server itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        os.close(log)
        os.write(reports, b"%d" % pid)
        os.write(reports, b"%d" % os.waitpid(pid, 0)[1])
        os._exit(0)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, max(log, reports) + 9)
    return True


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import fake_server

    import pageturner.server.app
    import pageturner.server.engine_client.supervisor
    import pageturner.server.prefixes
    import pageturner.server.receipts
    import pageturner.server.service  # noqa: F401
    from pageturner.server.api.batches import batches  # noqa: F401
    from pageturner.server.text_workers import reading  # noqa: F401
    from server import bytes_tokenizer  # noqa: F401

    words, env = forked()
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = words
    return fake_server.main()


if __name__ == "__main__":
    sys.exit(main())
