"""A small streaming client for OpenAI-compatible servers: one connection a request, times of every
chunk.

Owns what is asked and when each token came. Must not know HTTP, which http_client.py speaks. Cheap
on purpose: on two cores a heavy client would be measured along with the server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pageturner.http.http_client import (
    ConnectionLost,
    EventSplitter,
    ServerAddress,
    connect,
    parse_address,
    request_bytes,
)

CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 600.0
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSALS = (b'"ttft_target_unreachable"', b'"deadline_unreachable"', b'"deadline_exceeded"')


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class ResponseTimes:
    """The times and the answer of one request. Times are time.monotonic() seconds.

    chunks  arrival of each chunk that carried text or a token; tokens  as counted by the server's
            usage
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


class Client:
    """Sends streaming completion requests to one server.

    base_url  such as http://127.0.0.1:8000 (a trailing /v1 is accepted); extra  fields added to
              every request
    ignore_eos  False for a server that refuses this field: its answers end where its model ends
                them
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        endpoint: str = "completions",
        extra: dict[str, Any] | None = None,
        ignore_eos: bool = True,
    ) -> None:
        self._address = parse_address(base_url, "--base-url")
        self._model = model
        json_type = (b"Content-Type", b"application/json")
        self._headers = [json_type, *authorization(api_key)]
        self._endpoint = endpoint
        self._extra = extra or {}
        self._ignore_eos = ignore_eos

    async def complete(
        self,
        prompt: str,
        max_tokens: int,
        forced_end: int | None = None,
        times: ResponseTimes | None = None,
    ) -> ResponseTimes:
        """Ask for one completion, streamed to its end. Failures are in ResponseTimes.error, never
        raised.

        forced_end  None: exactly `max_tokens` tokens. Otherwise the answer ends there, unknown to
                    the scheduler: a field of ours, which other servers ignore
        times       where to note it: whoever cancels this still has what came until then
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
            if self._ignore_eos:
                fields["ignore_eos"] = True
        else:
            fields["forced_end"] = forced_end
        times = ResponseTimes() if times is None else times
        times.begin = time.monotonic()
        try:
            await self._run(msgspec.json.encode(fields), times)
        except (ConnectionLost, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            times.error = f"{type(error).__name__}: {error}"
        times.end = time.monotonic()
        if times.error is None and not times.chunks:
            times.error = "the server sent no token"
        wanted = min(forced_end or max_tokens, max_tokens)
        if times.error is None and forced_end is not None and times.tokens != wanted:
            times.error = (
                f"{times.tokens} tokens instead of {wanted}: the server ignores forced_end"
            )
        return times

    async def _run(self, body: bytes, times: ResponseTimes) -> None:
        request = request_bytes(self._address, "POST", PATHS[self._endpoint], self._headers, body)
        async with connect(self._address, CONNECT_TIMEOUT, READ_TIMEOUT) as exchange:
            await exchange.send(request)
            if exchange.status != 200:
                answer = await exchange.read_rest()
                times.error = f"HTTP {exchange.status}: {answer[:500].decode(errors='replace')}"
                times.refused = any(reason in answer for reason in REFUSALS)
                return
            events = EventSplitter()
            while not exchange.ended:
                for event in events.feed(await exchange.read_piece()):
                    _take(event, exchange.received_at, times)


def _take(event: bytes, now: float, times: ResponseTimes) -> None:
    if event == b"[DONE]":
        return
    message = _event.decode(event)
    if message.error is not None:
        times.error = str(message.error)
        times.refused = any(reason in event for reason in REFUSALS)
        return
    if message.usage is not None:
        times.tokens = message.usage.completion_tokens
        times.prompt_tokens = message.usage.prompt_tokens
    for choice in message.choices or ():
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or ""
        # the role of a chat comes in a chunk of its own, with no token
        if text or (choice.finish_reason is None and delta.role is None):
            times.chunks.append(now)
            times.text.append(text)
        if choice.finish_reason:
            times.finish = choice.finish_reason
            if not times.chunks:  # an answer of one token, which has no text: the end of sequence
                times.chunks.append(now)


async def get(address: ServerAddress, path: str, api_key: str, seconds: float) -> tuple[int, bytes]:
    """Return the status and the body of a page of a server, which has so many seconds to be
    reached, and as many for each piece of its answer. ConnectionLost where nobody answers."""
    headers = authorization(api_key)
    async with connect(address, seconds, seconds) as exchange:
        await exchange.send(request_bytes(address, "GET", path, headers, b""))
        return exchange.status, await exchange.read_rest()


def authorization(api_key: str) -> list[tuple[bytes, bytes]]:
    """Return the header with a key; none for no key."""
    return [(b"Authorization", f"Bearer {api_key}".encode())] if api_key else []
