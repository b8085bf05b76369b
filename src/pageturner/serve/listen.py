"""How a program of ours listens: the socket, uvicorn, the log.

Owns what `pageturner serve` and `pageturner route` have in common. Signals, and what is served, are theirs.
"""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

from pageturner.errors import EngineFault

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. EngineFault('port_in_use') and the like when that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def url_of(listener: socket.socket) -> str:
    """Where it can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr(level: str) -> None:
    """Our log; those of uvicorn and asyncio only where everything is wanted."""
    import logging

    level = level.upper()
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(level if level == "DEBUG" else "CRITICAL")


def http_server(app: Any) -> Any:
    """uvicorn without its signals, logs and lifespan: those are ours."""
    import contextlib
    from collections.abc import Iterator

    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
    )
