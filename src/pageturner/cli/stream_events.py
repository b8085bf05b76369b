"""The events in the stream of a server with the OpenAI API, as the commands of a terminal read
them.

Owns which fields of an event are looked at, and what is no event. Must not know what is asked, nor
how answers are shown. A server is not trusted: whatever it sends is an event or a ClientError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from pageturner.errors import ClientError, one_line

MAX_EVENT = 8 << 20  # bytes


class MessageDelta(msgspec.Struct):
    content: str | None = None


class StreamedChoice(msgspec.Struct):
    text: str | None = None
    delta: MessageDelta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class StreamEvent(msgspec.Struct):
    """error: what the server says in place of an answer."""

    choices: list[StreamedChoice] | None = None
    usage: Usage | None = None
    error: Any = None


class LineReader(Protocol):
    def readline(self, size: int, /) -> bytes: ...


_decoder = msgspec.json.Decoder(StreamEvent)


def stream_events(response: LineReader) -> Iterator[StreamEvent]:
    """The events of a stream until its end, or its `[DONE]`. ClientError for what is none, and for
    an error."""
    while line := response.readline(MAX_EVENT):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(
                502, "bad_event", f"the server sent what is no JSON of an answer: {data[:80]!r}"
            ) from error
        if event.error is not None:
            told = event.error.get("message") if isinstance(event.error, dict) else None
            raise ClientError(500, "server_error", one_line(str(told or event.error)))
        yield event
