"""Stands between a client and a server, on loopback: passes every byte on, and keeps what was asked and
answered. With a script it has the model of a server with `--developer` say given texts.

Owns what is kept of an exchange, and the one field that a script adds. Must not know any client (codex.py,
claude_code.py, opencode.py).
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CALLS = (
    "function_call",
    "custom_tool_call",
    "tool_use",
)  # types of items and blocks that are calls
HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "host"})
TIMEOUT = 600.0  # seconds that the server may be silent


@dataclass(slots=True)
class Exchange:
    """One request and its answer. status 0: there was none."""

    method: str
    path: str
    request: bytes
    status: int = 0
    answer: bytes = b""

    @property
    def asked(self) -> dict[str, Any]:
        """The request's JSON, {} where it is none."""
        try:
            told = json.loads(self.request)
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    def events(self) -> list[dict[str, Any]]:
        """What was answered: the events of a stream, or one object."""
        text = self.answer.decode("utf-8", "replace")
        lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
        try:
            return [json.loads(line) for line in lines or [text]]
        except ValueError:
            return []

    def calls(self) -> list[str]:
        """Names of the tools that were called in it, in any of the shapes."""
        found: list[str] = []
        for event in self.events():
            for item in (event.get("item"), event.get("content_block")):
                begins = str(event.get("type")).endswith((".added", "_start"))
                if begins and isinstance(item, dict) and item.get("type") in CALLS:
                    found.append(item["name"])
            for choice in event.get("choices", ()):
                told = choice.get("delta") or choice.get("message") or {}
                found += [
                    one["function"]["name"] for one in told.get("tool_calls", ()) if "id" in one
                ]
        return found

    def error(self) -> str:
        """What was said where it was refused."""
        return self.answer.decode("utf-8", "replace")[:300] if self.status >= 400 else ""


@dataclass(slots=True)
class Recorder:
    """url: what the client is given instead of the server's."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)


class Script:
    """What the model says in its turns, one text after the other: whatever it would say itself. A turn is a
    request with tools. Behind the last text it speaks for itself."""

    def __init__(self, server: str, texts: Sequence[str]) -> None:
        self._server, self._texts = server, list(texts)
        self._lock = threading.Lock()

    def applied(self, exchange: Exchange) -> bytes:
        """The request with the next text in it."""
        asked = exchange.asked
        with self._lock:
            if (
                exchange.method != "POST"
                or not asked.get("tools")
                or "count_tokens" in exchange.path
            ):
                return exchange.request
            if not self._texts:
                return exchange.request
            ids = self._tokens(self._texts.pop(0))
        return json.dumps({**asked, "force_ids": ids}).encode()

    def _tokens(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._server}/tokenize", body, head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            ids: list[int] = json.load(answer)["tokens"]
            return ids


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that leaves in the middle is no error here: what came until then is kept."""


@contextmanager
def recording(server: str, script: Script | None = None) -> Iterator[Recorder]:
    """A recorder in front of the server at this address, `http://HOST:PORT`."""
    address = urllib.parse.urlsplit(server)
    recorder = Recorder("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            exchange = Exchange(self.command, self.path, body)
            recorder.exchanges.append(exchange)
            if script is not None:
                body = script.applied(exchange)
            upstream = http.client.HTTPConnection(
                str(address.hostname), address.port, timeout=TIMEOUT
            )
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in HOP_BY_HOP
            }
            try:
                upstream.request(self.command, self.path, body, headers)
                self._pass_on(upstream.getresponse(), exchange)
            except OSError:
                self.close_connection = True  # of either side; what came until then is kept
            finally:
                upstream.close()

        def _pass_on(self, answer: http.client.HTTPResponse, exchange: Exchange) -> None:
            exchange.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while piece := answer.read1(1 << 16):
                exchange.answer += piece
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = do_HEAD = handle_any

    proxy = _Proxy(("127.0.0.1", 0), Handler)
    recorder.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        proxy.server_close()
