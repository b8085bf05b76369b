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
from pageturner.server.api.responses.response_items import INPUT, sealed
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


@dataclass(frozen=True, slots=True)
class _ItemForm:
    """The form in which a kind of part is written.

    prefix    begins the ids of its items, whose type is `type`
    texts     begins the names of the events of its text
    parts     begins those of its one inner part, whose type is `inner`; "": it has none
    index     the field that says which inner part an event is about
    annotated its text has fields for logprobs and annotations, which are empty here
    """

    prefix: str
    type: str
    texts: str
    parts: str = ""
    inner: str = ""
    index: str = ""
    annotated: bool = False

    @property
    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.annotated else {}

    def part(self, text: str) -> dict[str, Any]:
        """The inner part with this text."""
        annotations: dict[str, Any] = {"annotations": []} if self.annotated else {}
        return {"type": self.inner, "text": text, **annotations, **self.logprobs}


MESSAGE = _ItemForm(
    prefix="msg",
    type="message",
    texts="response.output_text",
    parts="response.content_part",
    inner="output_text",
    index="content_index",
    annotated=True,
)
THOUGHTS = _ItemForm(
    prefix="rs",
    type="reasoning",
    texts="response.reasoning_text",
    parts="response.content_part",
    inner="reasoning_text",
    index="content_index",
)
SUMMARY = _ItemForm(
    prefix="rs",
    type="reasoning",
    texts="response.reasoning_summary_text",
    parts="response.reasoning_summary_part",
    inner="summary_text",
    index="summary_index",
)
CALL_OF_JSON = _ItemForm("fc", "function_call", "response.function_call_arguments")
TEXT_CALL = _ItemForm("ctc", "custom_tool_call", "response.custom_tool_call_input")


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
        parts = parts_of(reply, streams[0], answer)
        return encode(self._ended(reply, streams, parts))

    def begin(self, reply: Reply, stream: OutputStream) -> bytes:
        """The events by which the answer begins, and its one item where it can have no others."""
        if not reply.begins(stream):
            return b""
        begun = self._response(reply, [])
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
        response = self._response(reply, output, error=error_object(error))
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
        response = self._response(
            reply,
            output,
            incomplete_details=cut,
            usage=_usage(reply, streams),
            completed_at=int(time.time()),
        )
        record.body, record.output = encode(response), encode(output)
        return response

    def _response(self, reply: Reply, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer, with the sampling parameters that it repeats."""
        params = reply.call.params[0]
        more |= {"temperature": params.temperature, "top_p": params.top_p}
        return response_object(self._record(reply), reply.model, output, **more)

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

    def item(self, part: AnswerPart, status: str, empty: bool = False) -> dict[str, Any]:
        """One item. empty: nothing of its text is told yet."""
        form = self._form(part)
        text = part.text
        shown = [form.part(text)]
        if empty:
            text = ""
            shown = []
        head = {"id": self._id(part), "status": status, "type": form.type}
        if form is MESSAGE:
            return {**head, "role": "assistant", "content": shown}
        if part.kind == REASONING:
            told: dict[str, Any] = {"summary": shown}
            if form is THOUGHTS:
                told = {"summary": [], "content": shown}
            if self.record.options.encrypted and not empty:
                told["encrypted_content"] = sealed(text)
            return head | told
        space, own = self._space(part)
        name = {"call_id": call_id(self.reply, 0, part.call), "name": own}
        name |= {"namespace": space} if space else {}
        if form is TEXT_CALL:
            return {**head, **name, "input": _input(text)}
        return {**head, **name, "arguments": text}

    def begins(self, part: AnswerPart) -> _Events:
        form = self._form(part)
        added = {"output_index": part.index, "item": self.item(part, IN_PROGRESS, empty=True)}
        events: _Events = [("response.output_item.added", added)]
        if form.parts:
            events.append((f"{form.parts}.added", self._at(part, part=form.part(""))))
        return events

    def goes_on(self, part: AnswerPart, text: str) -> _Events:
        form = self._form(part)
        if form is TEXT_CALL:
            return []  # its text is known when its JSON is
        return [(f"{form.texts}.delta", self._at(part, delta=text, **form.logprobs))]

    def ends(self, part: AnswerPart, status: str) -> _Events:
        form = self._form(part)
        text = part.text
        events: _Events = []
        if form is TEXT_CALL:
            events.append((f"{form.texts}.delta", self._at(part, delta=_input(text))))
            done: dict[str, Any] = {"input": _input(text)}
        elif form is CALL_OF_JSON:
            done = {"name": self._space(part)[1], "arguments": text}
        else:
            done = {"text": text, **form.logprobs}
        events.append((f"{form.texts}.done", self._at(part, **done)))
        if form.parts:
            events.append((f"{form.parts}.done", self._at(part, part=form.part(text))))
        item = {"output_index": part.index, "item": self.item(part, status)}
        return [*events, ("response.output_item.done", item)]

    def _form(self, part: AnswerPart) -> _ItemForm:
        """Return the form in which this part is written, as the options of the request have it."""
        options = self.record.options
        if part.kind == CONTENT:
            return MESSAGE
        if part.kind == REASONING:
            return SUMMARY if options.summary else THOUGHTS
        return TEXT_CALL if part.name in options.custom else CALL_OF_JSON

    def _space(self, part: AnswerPart) -> tuple[str, str]:
        """Return the namespace of the tool that is called, or "", and its name there."""
        return self.record.options.spaces.get(part.name, ("", part.name))

    def _at(self, part: AnswerPart, /, **more: Any) -> dict[str, Any]:
        """Return the fields that locate a part in the answer, followed by `more`."""
        index = self._form(part).index
        place = {index: 0} if index else {}
        return {"item_id": self._id(part), "output_index": part.index, **place, **more}

    def _id(self, part: AnswerPart) -> str:
        place = f"_{part.index}" if part.index else ""
        return f"{self._form(part).prefix}_{self.record.id.removeprefix('resp_')}{place}"


def _status(part: AnswerPart, stream: OutputStream, parts: AnswerParts) -> str:
    """Return the status of an item that has ended. Only the last item of a truncated answer is
    incomplete."""
    cut = stream.finish == "length" and part is parts.parts[-1]
    return (
        INCOMPLETE if cut and (part.kind != CALL or json_object(part.text) is None) else COMPLETED
    )


def _input(arguments: str) -> str:
    """The text of a custom tool's call; "" where the answer was cut off within it."""
    told = {} if json_object(arguments) is None else json.loads(arguments)
    return str(told.get(INPUT, ""))


def _usage(reply: Reply, streams: list[OutputStream]) -> dict[str, Any]:
    used = usage(streams)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(streams, reply.readers)},
        "total_tokens": used["total_tokens"],
    }
