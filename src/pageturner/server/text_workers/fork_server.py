"""A process that does nothing but fork: the mother of the text workers.

It is forked from the server before the server's event loop, connections and threads begin, so that
its children start within milliseconds, with tokenizer and template in memory already, and inherit
nothing of any client. Owns that process, and that no child outlives it or it the server. Must not
know what its children do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import NoReturn

NAME = b"pageturner-text"  # of these processes, as top and ps show it
_FORK, _KILL = b"F", b"K"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PID = struct.Struct("<I")


class ForkServer:
    """work: what a child does with its end of a socket pair, until that closes."""

    def __init__(self, work: Callable[[socket.socket], None]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _alone(server, theirs, lambda: _fork_on_demand(theirs, work))
        theirs.close()
        self._control.setblocking(False)
        self.closed = False

    def fork(self) -> socket.socket:
        """Start a child; our end of its socket pair, at which it first says its process id. It
        closes when the child has ended, or could not be started. OSError when there is no fork
        server any more."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [_FORK], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def kill(self, pid: int) -> None:
        """End a child, if it has not ended."""
        with contextlib.suppress(OSError):  # with the fork server its children have ended too
            self._control.send(_KILL + _PID.pack(pid))

    def close(self) -> None:
        """End it and all its children, now."""
        if not self.closed:
            self.closed = True
            self._control.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


class LastingForkServer:
    """The fork server that is there, and another one when it was lost or is stuck.

    start  makes one, at once and whenever it takes another. OSError where none can be had
    """

    def __init__(self, start: Callable[[], ForkServer]) -> None:
        self._start = start
        self._present = start()
        self._closed = False

    def fork(self) -> tuple[socket.socket, ForkServer]:
        """Fork a worker, and return its socket and the fork server that it came from."""
        try:
            return self._present.fork(), self._present
        except OSError:
            self.replace(self._present)
            return self._present.fork(), self._present

    def replace(self, lost: ForkServer) -> None:
        """Take another one, unless that was done since: the children of `lost` end. OSError where
        none can be had, or after close."""
        if self._closed:
            raise OSError
        if lost is self._present:
            lost.close()
            self._present = self._start()

    def kill(self, pid: int) -> None:
        """End a worker, as a fork server does."""
        self._present.kill(pid)

    def close(self) -> None:
        """End it and all its children, now. None is started again."""
        self._closed = True
        self._present.close()


def _alone(parent: int, kept: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Return what a process does that was just forked: work, without the files of its parent, and
    end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME)
        if os.getppid() == parent:  # else it died before this one could be told
            # the terminal and the service manager signal all processes; the server says when these
            # end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.closerange(3, kept.fileno())
            os.closerange(kept.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            work()
            code = 0
    except Exception:
        import logging

        logging.getLogger("pageturner").exception("a text worker failed")
    finally:
        os._exit(code)  # without what the server's interpreter would do at its end


def _fork_on_demand(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    children: set[int] = set()
    own = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 16, 1)
        children -= _ended(children)
        if not data:
            return
        if data[:1] == _KILL:
            (pid,) = _PID.unpack(data[1:])
            if pid in children:  # it was not waited for, so no other process has its id
                os.kill(pid, signal.SIGKILL)
        elif fds:
            end = socket.socket(fileno=fds[0])
            with contextlib.suppress(
                OSError
            ):  # no more processes: the other end sees its socket close
                pid = os.fork()
                if pid == 0:
                    _alone(own, end, partial(work, end))
                children.add(pid)
            end.close()


def _ended(children: set[int]) -> set[int]:
    """Return those that have ended, which are waited for."""
    return {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
