"""/v1/responses: OpenAI's API of items, for text.

Owns its fields, and the shape of its answers and events. Must not know what all APIs have in common (call.py,
replies.py), nor how answers are kept and gone back to (response_store.py, responses_pages.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pageturner.errors import ClientError
from pageturner.serve import chat
from pageturner.serve.body import RequestBody, bad_request
from pageturner.serve.call import Call, ServedModel
from pageturner.serve.dialect import Dialect
from pageturner.serve.limits import RequestLimits
from pageturner.serve.replies import InParts, Reply, ReplyShape, encode, usage
from pageturner.serve.response_store import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ResponseRecord,
    ResponseStore,
)
from pageturner.serve.translate import Fields, fields_of, others, refuse, renaming, understood, value_of
from pageturner.serve.whole_answer import WholeAnswer
from pageturner.text.output_stream import OutputPiece, OutputStream

SAME = ("model", "temperature", "top_p", "stream", "user")  # fields that are ours as they are
TAKEN = frozenset({
    *SAME, "input", "instructions", "max_output_tokens", "text", "metadata", "reasoning", "include",
    "service_tier", "parallel_tool_calls", "stream_options", "prompt_cache_key", "safety_identifier",
    "max_tool_calls",
})  # fmt: skip
NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
LOGPROBS = "message.output_text.logprobs"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = frozenset({"input_text", "output_text", "text"})
PAST_THOUGHTS = frozenset({"reasoning"})  # items that no later turn is given
# fields that an answer repeats, and what it says where they were not sent
REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
    "text": {"format": {"type": "text"}}, "truncation": "disabled", "user": None,
}  # fmt: skip


# -- requests ------------------------------------------------------------------------------------------------
def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a chat. Whatever went before stands in its `input` already."""
    fields = fields_of(raw, limits)
    refuse(fields, NEUTRAL)
    if LOGPROBS in value_of(fields, "include", list[str], []):
        raise bad_request("unsupported_parameter", f"include: {LOGPROBS} is not supported yet", "include")
    ours = others(fields, TAKEN) | {name: fields[name] for name in SAME if name in fields}
    if "max_output_tokens" in fields:
        ours["max_tokens"] = fields["max_output_tokens"]
    if (form := _format(fields)) is not None:
        ours["response_format"] = form
    ours["messages"] = _messages(fields)
    return understood(ours, NAMES, limits)


def _format(fields: Fields) -> dict[str, Any] | None:
    """`response_format` as chats have it."""
    wanted = value_of(fields, "text", dict[str, Any], {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise bad_request("invalid_type", "text.format must be an object", "text.format")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, behind the instructions."""
    if "input" not in fields:
        raise bad_request("missing_field", "input is missing", "input")
    instructions = value_of(fields, "instructions", str, "")
    said = [{"role": "system", "content": instructions}] if instructions else []
    items = value_of(fields, "input", str | list[dict[str, Any]])
    if isinstance(items, str):
        return [*said, {"role": "user", "content": items}]
    for i, item in enumerate(items):
        kind = str(item.get("type", "message"))
        if kind in PAST_THOUGHTS:
            continue
        if kind != "message":
            message = f"input[{i}]: items of type {kind[:40]!r} are not supported yet, only messages"
            raise bad_request("unsupported_parameter", message, "input")
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_request("invalid_value", f"input[{i}].role is one of {', '.join(ROLES)}", "input")
        said.append({"role": ROLES[role], "content": _text(item.get("content"), f"input[{i}].content")})
    return said


def _text(content: Any, where: str) -> str:
    """The text of some content: a string, or parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("invalid_type", f"{where} must be a string or a list of parts", "input")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and str(part.get("type")) in TEXTS else None
        if not isinstance(text, str):
            raise bad_request(
                "unsupported_parameter", f"{where}: only parts of text are supported yet", "input"
            )
        texts.append(text)
    return "\n".join(texts)


def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/responses."""
    return renaming(NAMES, lambda: chat.read(body, served))


# -- answers -------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Written:
    """What was written of a stream: how many events, and which text."""

    events: int = 0
    texts: list[str] = field(default_factory=list)


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
        "tools": [],
        "tool_choice": "auto",
        "temperature": None,
        "top_p": None,
        "usage": None,
        **REPEATED,
        **record.asked,
        "store": record.store,
        **more,
    }


class ResponseWriter:
    """Writes the answers to the requests that a store knows to be under way, and leaves them there."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def whole(self, reply: Reply, streams: list[OutputStream], answer: WholeAnswer) -> InParts[bytes]:
        """The body of an answer that is not streamed."""
        yield
        return encode(self._ended(reply, streams, answer.texts[0]))

    def chunk(self, reply: Reply, piece: OutputPiece) -> bytes:
        """The events of one piece: before the first token the answer, its one item and its one part begin,
        behind the last one part and item end."""
        stream, parts = piece.stream, []
        if reply.begins(stream):
            record = self._record(reply)
            begun = response_object(record, reply.model, [], **_drawn(reply))
            item = _item(record, IN_PROGRESS, [])
            parts += [
                self._event(reply, "response.created", response=begun),
                self._event(reply, "response.in_progress", response=begun),
                self._event(reply, "response.output_item.added", output_index=0, item=item),
                self._part(reply, "response.content_part.added", part=_output_text("")),
            ]
        if piece.text:
            reply.state(_Written).texts.append(piece.text)
            parts.append(self._part(reply, "response.output_text.delta", delta=piece.text, logprobs=[]))
        if piece.last:
            text = "".join(reply.state(_Written).texts)
            item = _item(self._record(reply), _status(stream), [_output_text(text)])
            parts += [
                self._part(reply, "response.output_text.done", text=text, logprobs=[]),
                self._part(reply, "response.content_part.done", part=_output_text(text)),
                self._event(reply, "response.output_item.done", output_index=0, item=item),
            ]
        return b"".join(parts)

    def long_chunk(self, reply: Reply, piece: OutputPiece) -> InParts[bytes]:
        """`chunk`: nothing of it is long."""
        yield
        return self.chunk(reply, piece)

    def end(self, reply: Reply, streams: list[OutputStream]) -> bytes:
        """The event of the answer as a whole."""
        response = self._ended(reply, streams, "".join(reply.state(_Written).texts))
        return self._event(reply, f"response.{response['status']}", response=response)

    def failed(self, reply: Reply, error: ClientError) -> bytes:
        """The event of a failure in the middle."""
        record = self._record(reply)
        record.status = FAILED
        text = "".join(reply.state(_Written).texts)
        output = [_item(record, INCOMPLETE, [_output_text(text)])]
        response = response_object(record, reply.model, output, error=error_object(error), **_drawn(reply))
        record.body = encode(response)
        return self._event(reply, "response.failed", response=response)

    def _ended(self, reply: Reply, streams: list[OutputStream], text: str) -> dict[str, Any]:
        """The answer, which has ended with this text."""
        record, stream = self._record(reply), streams[0]
        record.status = _status(stream)
        output = [_item(record, record.status, [_output_text(text)])]
        cut = {"reason": "max_output_tokens"} if record.status == INCOMPLETE else None
        more = {"incomplete_details": cut, "usage": _usage(streams), "completed_at": int(time.time())}
        response = response_object(record, reply.model, output, **_drawn(reply), **more)
        record.body, record.output = encode(response), encode(output)
        return response

    def _record(self, reply: Reply) -> ResponseRecord:
        return self._store.opened(reply.about()["id"])

    def _event(self, reply: Reply, kind: str, **fields: Any) -> bytes:
        written = reply.state(_Written)
        number, written.events = written.events, written.events + 1
        body = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _part(self, reply: Reply, kind: str, **fields: Any) -> bytes:
        """An event of the one part of the one item."""
        item_id = _item_id(self._record(reply))
        return self._event(reply, kind, item_id=item_id, output_index=0, content_index=0, **fields)


def _status(stream: OutputStream) -> str:
    return INCOMPLETE if stream.finish == "length" else COMPLETED


def _item_id(record: ResponseRecord) -> str:
    return "msg_" + record.id.removeprefix("resp_")


def _item(record: ResponseRecord, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": _item_id(record), "type": "message", "status": status, "role": "assistant"}
    return {**head, "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _drawn(reply: Reply) -> dict[str, Any]:
    """How its tokens were chosen."""
    params = reply.call.params[0]
    return {"temperature": params.temperature, "top_p": params.top_p}


def _usage(streams: list[OutputStream]) -> dict[str, Any]:
    used = usage(streams)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }


def error_object(error: ClientError) -> dict[str, Any]:
    """What an answer says of its failure."""
    return {"code": error.code, "message": error.message}


def dialect_of(store: ResponseStore) -> Dialect:
    """The dialect for requests that this store knows."""
    writer = ResponseWriter(store)
    return Dialect(
        id_prefix="resp",
        shape=ReplyShape(
            whole_object="response", chunk_object="response", content=lambda text: {"delta": text}
        ),
        read=read,
        whole=writer.whole,
        chunk=writer.chunk,
        long_chunk=writer.long_chunk,
        failed=writer.failed,
        end=writer.end,
        separator="_",
        decode=decode,
    )


RESPONSES = dialect_of(ResponseStore(0))  # for whoever only reads requests
