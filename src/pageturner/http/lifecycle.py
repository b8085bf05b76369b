"""The life of a program that listens: its socket, uvicorn, signals, and a clean end.

Owns what `pageturner serve` and `pageturner route` have in common. Must not know what is served,
nor what else a program has to end. Imports little: the server starts its engine before it imports
what only it needs.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, cast

from pageturner.errors import EngineFault
from pageturner.garbage import Collector

if TYPE_CHECKING:
    import asyncio

    from pageturner.http.http_limits import HttpLimits
    from pageturner.http.memory_reserve import MemoryReserve
    from pageturner.http.tls import Certificates

BACKLOG = 2048
# bytes; larger ones are mapped, and unmapped when freed: all bodies but small ones
LARGE_BLOCK = 32 * 1024
_M_MMAP_THRESHOLD = -3
LEAVE_SECONDS = 1.0  # for the interpreter to end by itself
MARGIN = 10.0  # seconds for everything behind the drain
COLLECT_EVERY = 0.1  # seconds between two looks at whether garbage should be collected
TICK = 0.02  # seconds between two looks at whether all answers have ended


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. EngineFault('port_in_use') and the like when that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # inherited by every connection: else the body of an answer waits 40 ms for the receipt of its
    # head
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        hint = "another program has it: choose another one with --port" if taken else error.strerror
        code = "port_in_use" if taken else "cannot_listen"
        raise EngineFault(code, f"cannot listen on {host} port {port}: {hint}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return where it can be reached."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def give_large_blocks_back() -> None:
    """Have large bodies leave this process when they are freed. By default glibc keeps blocks of a
    size that was freed before, up to 32 MiB, in a heap with holes."""
    import contextlib
    import ctypes

    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def http_server(
    app: Any,
    limits: HttpLimits,
    refused: Counter[str],
    memory: MemoryReserve | None = None,
    certificates: Certificates | None = None,
) -> Any:
    """uvicorn without its signals, logs and lifespan: those are ours. So are its limits.

    refused  counts what was refused or cut off before the application saw it, by code
    memory   asked whether there is enough for a request; None: one of its own
    certificates  for TLS; None: plain HTTP
    """
    import contextlib
    import functools
    from collections.abc import Iterator

    import uvicorn

    from pageturner.http.http_limits import OpenConnections
    from pageturner.http.http_protocol import BoundedProtocol

    shared = OpenConnections(limits, refused, memory)
    protocol = functools.partial(BoundedProtocol, shared)
    if certificates is not None:
        from pageturner.http.tls import encrypted

        protocol = cast(Any, functools.partial(encrypted, shared, certificates))

    class UvicornWithoutSignals(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def main_loop(self) -> None:
            """Run uvicorn's main loop, which updates the Date header and whose end stops the
            server. It survives a MemoryError."""
            while not self.should_exit:
                with contextlib.suppress(MemoryError):
                    await super().main_loop()

    return UvicornWithoutSignals(
        uvicorn.Config(
            app,
            http=cast(Any, protocol),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=limits.idle_seconds,
            timeout_graceful_shutdown=1,
        )
    )


def run(main: Coroutine[Any, Any, int], out_of_memory: Callable[[], None] | None = None) -> int:
    """Run the event loop's whole life, and end the process shortly after it, whatever its threads
    still do.

    asyncio and the interpreter both wait for threads that work, and a thread cannot be told to
    stop: so nobody waits here. What is left when LEAVE_SECONDS have passed since `main` ended is
    ended with the process, which by then has written its last words and flushed its log.

    out_of_memory  see EnduringLoop
    """
    import asyncio

    from pageturner.http.enduring_loop import EnduringLoop

    code = 1
    # not closed: that would wait for the threads
    runner = asyncio.Runner(loop_factory=lambda: EnduringLoop(out_of_memory))
    try:
        code = runner.run(main)
    finally:
        _leave_within(LEAVE_SECONDS, lambda: code)
    return code


def _leave_within(seconds: float, code: Callable[[], int]) -> None:
    """End the process when it has not ended by itself after so many seconds."""
    import logging
    import threading

    def leave() -> None:
        try:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code())

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


async def collect_garbage(collector: Collector) -> None:
    """Have garbage collected between two turns of the event loop, for ever."""
    import asyncio

    collector.take_over()
    while True:
        await asyncio.sleep(COLLECT_EVERY)
        collector.look()


class Drainable(Protocol):
    """A program with answers under way. draining: it takes no new requests; active: answers under
    way."""

    draining: bool
    active: int


def drain_on_signals(
    program: Drainable, patience: float, before_exit: Callable[[], None] = lambda: None
) -> asyncio.Future[None]:
    """The first SIGTERM or SIGINT lets no new requests in, and completes the future; the second one
    ends the process at once. So does the first, when the drain has not ended MARGIN seconds after
    its time: both even if the event loop stands still, since the handler does not wait for it.

    patience     seconds that the drain may take
    before_exit  what must be done even then. Must not wait for anything
    """
    import asyncio
    import threading

    loop = asyncio.get_running_loop()
    stop = loop.create_future()
    asked: list[int] = []

    def leave(code: int) -> None:
        before_exit()
        os._exit(code)

    def begin() -> None:
        program.draining = True
        if not stop.done():
            stop.set_result(None)

    def on_signal(number: int, _: object) -> None:
        if asked:
            leave(128 + number)
        asked.append(number)
        timer = threading.Timer(patience + MARGIN, leave, (1,))
        timer.daemon = True
        timer.start()
        loop.call_soon_threadsafe(begin)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def reload_on_signal(*reloads: Callable[[], None]) -> None:
    """SIGHUP calls these, and ends nothing where there are none."""
    import asyncio

    def reload() -> None:
        for one in reloads:
            one()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


async def drain(
    program: Drainable, patience: float, hopeless: Callable[[], bool] = lambda: False
) -> None:
    """Let the answers under way finish, for at most `patience` seconds.

    hopeless  they never will: do not wait for them, and let others say why
    """
    import logging

    log = logging.getLogger("pageturner")
    program.draining = True
    if program.active and not hopeless():
        waiting = (
            "stopping: answers under way: %d, waiting at most %g s; another signal stops at once"
        )
        log.info(waiting, program.active, patience)
    await until_idle(program, patience, hopeless)
    if not hopeless():
        log.info("stopped; answers cut off: %d", program.active)


async def until_idle(
    program: Drainable, seconds: float, hopeless: Callable[[], bool] = lambda: False
) -> None:
    """Wait until no answer is under way, for at most so many seconds."""
    import asyncio

    deadline = time.monotonic() + seconds
    while program.active and time.monotonic() < deadline and not hopeless():
        await asyncio.sleep(TICK)
