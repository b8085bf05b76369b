"""The answers on a server's port before there is a server: how far the fetching of its model is.

Owns a thread that answers every request alike, a browser with a page that loads itself again. Must
not know what is fetched. The thread ends before the server starts, which forks.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from html import escape

from pageturner import progress

PATIENCE = 1.0  # seconds for a request to come, and for its answer to leave
MOST = 64 * 1024  # bytes of a request that are read
AGAIN = 2  # seconds
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{again}">
<title>Pageturner</title><style>:root {{ color-scheme: light dark }}
body {{ font: 16px system-ui, sans-serif; max-width: 40em; margin: 15vh auto; padding: 0 1em }}</style>
<h1>Pageturner</h1><p role="status">{text}</p>
<p>This page becomes the chat when the model is there.</p></html>"""


@contextlib.contextmanager
def waiting_room(listener: socket.socket) -> Iterator[None]:
    """Within this, requests on the port are answered with what is being done."""
    over, end = os.pipe()
    thread = threading.Thread(target=_answer_all, args=(listener, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(over)


def _answer_all(listener: socket.socket, over: int) -> None:
    while over not in select.select([listener.fileno(), over], [], [])[0]:
        with contextlib.suppress(OSError):  # the client left, or sends nothing
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE)
                connection.sendall(_answer(connection.recv(MOST)))


def _answer(request: bytes) -> bytes:
    text = progress.doing() or "the model is looked for"
    if b"text/html" in request:
        kind, body = "text/html", PAGE.format(text=escape(text), again=AGAIN).encode()
    else:
        # late: the engine starts before what only the server needs is imported
        from pageturner.http.error_responses import error_body

        kind, body = "application/json", error_body(503, "loading", f"the server starts: {text}")
    head = (
        "HTTP/1.1 503 Service Unavailable",
        f"content-type: {kind}; charset=utf-8",
        f"content-length: {len(body)}",
        f"retry-after: {AGAIN}",
        "cache-control: no-store",
        "connection: close",
    )
    return "\r\n".join([*head, "", ""]).encode() + body
