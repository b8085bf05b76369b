"""A small streaming client for OpenAI-compatible servers: one connection a request, times of every chunk.

Owns its end of HTTP/1.1 (parsed by httptools) and server-sent events. Cheap on purpose: on two cores a heavy
client would be measured along with the server.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 600.0
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSALS = (b'"ttft_target_unreachable"', b'"deadline_unreachable"', b'"deadline_exceeded"')


@dataclass(slots=True)
class StreamTimes:
    """What one request went through. Times are time.monotonic() seconds.

    chunks  arrival of each chunk that carried text or a token; tokens  as counted by the server's usage
    refused   for its targets, by a server of ours: an honest answer, which is in `error` too
    """

    begin: float = 0.0
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    finish: str | None = None
    error: str | None = None
    refused: bool = False

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.begin

    @property
    def tpot(self) -> float:
        """Mean seconds for each output token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.tokens - 1, 1)

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


class _Events:
    """httptools callbacks: collects body bytes, splits them into server-sent events."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.body = bytearray()
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_message_complete(self) -> None:
        self.done = True

    def events(self) -> list[bytes]:
        """Payloads of the complete `data:` lines received so far."""
        *whole, rest = bytes(self.body).split(b"\n\n")
        self.body[:] = rest
        return [event[6:] for event in whole if event.startswith(b"data: ")]


class Client:
    """Sends streaming completion requests to one server.

    base_url  such as http://127.0.0.1:8000 (a trailing /v1 is accepted); extra  fields added to every request
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        endpoint: str = "completions",
        extra: dict[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"--base-url must look like http://HOST:PORT, not {base_url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._endpoint = endpoint
        self._extra = extra or {}

    async def complete(self, prompt: str, max_tokens: int, forced_end: int | None = None) -> StreamTimes:
        """Ask for one completion, streamed to its end. Failures are in StreamTimes.error, never raised.

        forced_end  None: exactly `max_tokens` tokens. Otherwise the answer ends there, unknown to the
                    scheduler: a field of ours, which other servers ignore
        """
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if self._endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if forced_end is None:
            fields["ignore_eos"] = True
        else:
            fields["forced_end"] = forced_end
        times = StreamTimes(begin=time.monotonic())
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                await self._run(msgspec.json.encode(fields), times)
        except (OSError, TimeoutError, httptools.HttpParserError, msgspec.DecodeError) as error:
            times.error = f"{type(error).__name__}: {error}"
        times.end = time.monotonic()
        if times.error is None and not times.chunks:
            times.error = "the server sent no token"
        wanted = min(forced_end or max_tokens, max_tokens)
        if times.error is None and forced_end is not None and times.tokens != wanted:
            times.error = f"{times.tokens} tokens instead of {wanted}: the server ignores forced_end"
        return times

    async def _run(self, body: bytes, times: StreamTimes) -> None:
        opening = asyncio.open_connection(self._host, self._port)
        reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
        head = (
            f"POST {self._prefix}{PATHS[self._endpoint]} HTTP/1.1\r\n"
            f"Host: {self._host}:{self._port}\r\n{self._auth}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            stream = _Events()
            while not stream.done:
                data = await reader.read(65536)
                if not data:
                    break
                now = time.monotonic()
                stream.parser.feed_data(data)
                if stream.status == 200:
                    for event in stream.events():
                        _take(event, now, times)
            if stream.status != 200:
                times.error = f"HTTP {stream.status}: {bytes(stream.body[:500]).decode(errors='replace')}"
                times.refused = any(reason in stream.body for reason in REFUSALS)
        finally:
            writer.close()


def _take(event: bytes, now: float, times: StreamTimes) -> None:
    if event == b"[DONE]":
        return
    message = msgspec.json.decode(event)
    if "error" in message:
        times.error = str(message["error"])
        times.refused = any(reason in event for reason in REFUSALS)
        return
    if usage := message.get("usage"):
        times.tokens = usage["completion_tokens"]
        times.prompt_tokens = usage["prompt_tokens"]
    for choice in message.get("choices", ()):
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        # the role of a chat comes in a chunk of its own, with no token
        if text or (choice.get("finish_reason") is None and "role" not in delta):
            times.chunks.append(now)
            times.text.append(text)
        if choice.get("finish_reason"):
            times.finish = choice["finish_reason"]
            if not times.chunks:  # an answer of one token, which has no text: the end of sequence
                times.chunks.append(now)
