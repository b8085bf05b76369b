"""Write answers of /v1/responses as items, whole or as a stream of events.

Owns the shape of its items and events. Must not know the fields of a request (responses.py,
response_items.py), nor how answers are kept (response_store.py).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from pageturner.errors import ClientError
from pageturner.server.api.base.answer_parts import (
    CALL,
    CONTENT,
    REASONING,
    AnswerPart,
    AnswerParts,
    PartEvent,
    call_id,
    json_object,
    parts_of,
    read_piece,
)
from pageturner.server.api.base.replies import InParts, Reply, encode
from pageturner.server.api.base.usage import reasoning_tokens, usage
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.responses.response_items import INPUT, ItemOptions, sealed
from pageturner.server.api.responses.response_store import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ResponseRecord,
    ResponseStore,
)
from pageturner.text.output_stream import OutputPiece, OutputStream

# fields that an answer repeats, and what it says where they were not sent
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
CUSTOM = "custom"  # beside the kinds of AnswerPart: a call of text
PREFIXES = {CONTENT: "msg", REASONING: "rs", CALL: "fc", CUSTOM: "ctc"}  # of ids


@dataclass(slots=True)
class _Written:
    """The state of a stream as written so far: the number of events, and the parts."""

    events: int = 0
    parts: AnswerParts = field(default_factory=AnswerParts)


def response_object(
    record: ResponseRecord, model: str, output: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """The answer, as far as it is known."""
    return {
        "id": record.id,
        "object": "response",
        "created_at": record.created,
        "status": record.status,
        "background": record.background,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "temperature": None,
        "top_p": None,
        "usage": None,
        **REPEATED,
        **record.asked,
        "store": record.store,
        **more,
    }


def error_object(error: ClientError) -> dict[str, Any]:
    """Return the error object of a failed answer."""
    return {"code": error.code, "message": error.message}


class ResponseWriter:
    """Writes the answers to the requests that a store knows to be under way, and leaves them
    there."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def whole(
        self, reply: Reply, streams: list[OutputStream], answer: WholeAnswer
    ) -> InParts[bytes]:
        """The body of an answer that is not streamed."""
        yield
        parts = parts_of(reply, streams[0], answer.texts[0], answer.offsets[0])
        return encode(self._ended(reply, streams, parts))

    def begin(self, reply: Reply, stream: OutputStream) -> bytes:
        """The events by which the answer begins, and its one item where it can have no others."""
        if not reply.begins(stream):
            return b""
        begun = response_object(self._record(reply), reply.model, [], **_drawn(reply))
        names = ("response.created", "response.in_progress")
        made = [self._event(reply, name, response=begun) for name in names]
        if reply.call.answer is None:
            made += self._part_events(reply, stream, reply.state(_Written).parts.begin(CONTENT))
        return b"".join(made)

    def chunk(self, reply: Reply, piece: OutputPiece) -> bytes:
        """The events of one piece: before the first token `begin`."""
        stream, written = piece.stream, reply.state(_Written)
        made = [self.begin(reply, stream)]
        for event in read_piece(reply, written.parts, piece):
            made += self._part_events(reply, stream, event)
        return b"".join(made)

    def end(self, reply: Reply, streams: list[OutputStream]) -> bytes:
        """The event of the answer as a whole."""
        response = self._ended(reply, streams, reply.state(_Written).parts)
        return self._event(reply, f"response.{response['status']}", response=response)

    def failed(self, reply: Reply, error: ClientError) -> bytes:
        """The event of a failure in the middle."""
        record, parts = self._record(reply), reply.state(_Written).parts.parts
        record.status = FAILED
        writer = _ItemWriter(reply, record)
        output = [writer.item(part, COMPLETED) for part in parts[:-1]]
        output += [writer.item(part, INCOMPLETE) for part in parts[-1:]]
        response = response_object(
            record, reply.model, output, error=error_object(error), **_drawn(reply)
        )
        record.body = encode(response)
        return self._event(reply, "response.failed", response=response)

    def _ended(
        self, reply: Reply, streams: list[OutputStream], parts: AnswerParts
    ) -> dict[str, Any]:
        """The answer, which has ended with these parts."""
        record, stream = self._record(reply), streams[0]
        record.status = INCOMPLETE if stream.finish == "length" else COMPLETED
        writer = _ItemWriter(reply, record)
        output = [writer.item(part, _status(part, stream, parts)) for part in parts.parts]
        cut = {"reason": "max_output_tokens"} if record.status == INCOMPLETE else None
        more = {
            "incomplete_details": cut,
            "usage": _usage(reply, streams),
            "completed_at": int(time.time()),
        }
        response = response_object(record, reply.model, output, **_drawn(reply), **more)
        record.body, record.output = encode(response), encode(output)
        return response

    def _record(self, reply: Reply) -> ResponseRecord:
        return self._store.opened(reply.id, reply.tenant)

    def _part_events(self, reply: Reply, stream: OutputStream, event: PartEvent) -> list[bytes]:
        """The events of what is new in one item."""
        writer = _ItemWriter(reply, self._record(reply))
        if event.kind == "begin":
            told = writer.begins(event.part)
        elif event.kind == "more":
            told = writer.goes_on(event.part, event.text)
        else:
            told = writer.ends(event.part, _status(event.part, stream, reply.state(_Written).parts))
        return [self._event(reply, kind, **fields) for kind, fields in told]

    def _event(self, reply: Reply, kind: str, **fields: Any) -> bytes:
        written = reply.state(_Written)
        number, written.events = written.events, written.events + 1
        body = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


_Events = list[tuple[str, dict[str, Any]]]  # kinds, and what they say


@dataclass(frozen=True, slots=True)
class _ItemWriter:
    """Writes the items of one answer."""

    reply: Reply
    record: ResponseRecord

    @property
    def options(self) -> ItemOptions:
        return self.record.options

    def item(self, part: AnswerPart, status: str, empty: bool = False) -> dict[str, Any]:
        """One item. empty: nothing of its text is told yet."""
        kind, text = self._kind(part), "" if empty else part.text
        head = {"id": self._id(part), "status": status}
        if kind == CONTENT:
            content = [] if empty else [_output_text(text)]
            return {**head, "type": "message", "role": "assistant", "content": content}
        if kind == REASONING:
            return {**head, "type": "reasoning", **self._thoughts(text, empty)}
        space, own = self.options.spaces.get(part.name, ("", part.name))
        name = {"call_id": call_id(self.reply, 0, part.call), "name": own}
        name |= {"namespace": space} if space else {}
        if kind == CUSTOM:
            return {**head, "type": "custom_tool_call", **name, "input": _input(text)}
        return {**head, "type": "function_call", **name, "arguments": text}

    def begins(self, part: AnswerPart) -> _Events:
        added = {"output_index": part.index, "item": self.item(part, IN_PROGRESS, empty=True)}
        events: _Events = [("response.output_item.added", added)]
        kind = self._kind(part)
        if kind == CONTENT:
            events.append(("response.content_part.added", self._at(part, part=_output_text(""))))
        elif kind == REASONING and self.options.summary:
            told = self._at(part, part=_summary(""))
            events.append(("response.reasoning_summary_part.added", told))
        elif kind == REASONING:
            events.append(("response.content_part.added", self._at(part, part=_reasoning_text(""))))
        return events

    def goes_on(self, part: AnswerPart, text: str) -> _Events:
        kind = self._kind(part)
        if kind == CUSTOM:
            return []  # its text is known when its JSON is
        more: dict[str, Any] = {"logprobs": []} if kind == CONTENT else {}
        return [(f"response.{self._text_kind(part)}.delta", self._at(part, delta=text, **more))]

    def ends(self, part: AnswerPart, status: str) -> _Events:
        kind, text, name = self._kind(part), part.text, f"response.{self._text_kind(part)}"
        done = {"output_index": part.index, "item": self.item(part, status)}
        last: _Events = [("response.output_item.done", done)]
        if kind == CUSTOM:
            told = self._at(part, delta=_input(text)), self._at(part, input=_input(text))
            return [(f"{name}.delta", told[0]), (f"{name}.done", told[1]), *last]
        if kind == CALL:
            _, own = self.options.spaces.get(part.name, ("", part.name))
            return [(f"{name}.done", self._at(part, name=own, arguments=text)), *last]
        if kind == CONTENT:
            ended = self._at(part, part=_output_text(text))
            return [
                (f"{name}.done", self._at(part, text=text, logprobs=[])),
                ("response.content_part.done", ended),
                *last,
            ]
        inner = "reasoning_summary_part" if self.options.summary else "content_part"
        ended = self._at(part, part=(_summary if self.options.summary else _reasoning_text)(text))
        return [
            (f"{name}.done", self._at(part, text=text)),
            (f"response.{inner}.done", ended),
            *last,
        ]

    def _kind(self, part: AnswerPart) -> str:
        return CUSTOM if part.kind == CALL and part.name in self.options.custom else part.kind

    def _text_kind(self, part: AnswerPart) -> str:
        """Return the name of the text events of this part."""
        thoughts = "reasoning_summary_text" if self.options.summary else "reasoning_text"
        return {
            CONTENT: "output_text",
            REASONING: thoughts,
            CALL: "function_call_arguments",
            CUSTOM: "custom_tool_call_input",
        }[self._kind(part)]

    def _at(self, part: AnswerPart, /, **more: Any) -> dict[str, Any]:
        """Return the fields that locate a part in the answer, followed by `more`."""
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        if part.kind == REASONING and self.options.summary:
            place["summary_index"] = 0
        elif part.kind != CALL:
            place["content_index"] = 0
        return {**place, **more}

    def _id(self, part: AnswerPart) -> str:
        place = f"_{part.index}" if part.index else ""
        return f"{PREFIXES[self._kind(part)]}_{self.record.id.removeprefix('resp_')}{place}"

    def _thoughts(self, text: str, empty: bool) -> dict[str, Any]:
        shown = [] if empty else [(_summary if self.options.summary else _reasoning_text)(text)]
        told = {"summary": shown} if self.options.summary else {"summary": [], "content": shown}
        return told | (
            {"encrypted_content": sealed(text)} if self.options.encrypted and not empty else {}
        )


def _status(part: AnswerPart, stream: OutputStream, parts: AnswerParts) -> str:
    """Return the status of an item that has ended. Only the last item of a truncated answer is
    incomplete."""
    cut = stream.finish == "length" and part is parts.parts[-1]
    return (
        INCOMPLETE if cut and (part.kind != CALL or json_object(part.text) is None) else COMPLETED
    )


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _input(arguments: str) -> str:
    """The text of a custom tool's call; "" where the answer was cut off within it."""
    told = {} if json_object(arguments) is None else json.loads(arguments)
    return str(told.get(INPUT, ""))


def _drawn(reply: Reply) -> dict[str, Any]:
    """Return the sampling parameters that an answer repeats."""
    params = reply.call.params[0]
    return {"temperature": params.temperature, "top_p": params.top_p}


def _usage(reply: Reply, streams: list[OutputStream]) -> dict[str, Any]:
    used = usage(streams)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(streams, reply.readers)},
        "total_tokens": used["total_tokens"],
    }
