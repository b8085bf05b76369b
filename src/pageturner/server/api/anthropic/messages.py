"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, for text, tools and thoughts.

Owns its fields, and the shape of its answers and events. Must not know what all APIs have in common
(call.py, replies.py), nor its blocks and tools (anthropic_fields.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from pageturner.errors import ClientError
from pageturner.http.error_responses import anthropic_error
from pageturner.server.admission.limits import LONGEST_NAME, NO_LIMITS, RequestLimits, check_size
from pageturner.server.api.anthropic.anthropic_fields import (
    conversation,
    thinking_fields,
    tool_fields,
)
from pageturner.server.api.base import answer_grammar
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
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.call import Call, check_model
from pageturner.server.api.base.dialect import Dialect, no_end
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import FIELD_MAPS, Fields, fields_of, value_of
from pageturner.server.api.base.usage import reasoning_tokens
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai import chat
from pageturner.text.output_stream import OutputPiece, OutputStream

FIELDS = FIELD_MAPS["anthropic"]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
TOO_LONG = ("context_length_exceeded", "kv_capacity_exceeded")


# -- requests --------------------------------------------------------------------------------------
def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a chat."""
    fields = fields_of(raw, limits)
    for name in ("max_tokens", "messages"):
        if name not in fields:
            raise bad_request("missing_field", f"{name} is missing", name)
    return _chat(fields, limits)


def _chat(fields: Fields, limits: RequestLimits) -> RequestBody:
    ours = FIELDS.passed_on(fields)
    messages = conversation(fields)
    ours |= thinking_fields(fields) | tool_fields(fields) | {"messages": messages}
    ours["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
    if stops := value_of(fields, "stop_sequences", list[str], []):
        ours["stop"] = stops
    user = value_of(fields, "metadata", dict[str, Any], {}).get("user_id")
    if isinstance(user, str) and 0 < len(user) <= LONGEST_NAME:
        ours["user"] = user
    if (form := _format(fields)) is not None:
        ours["response_format"] = {"type": "json_schema", "json_schema": form}
    return FIELDS.to_openai_request(ours, limits)


def _format(fields: Fields) -> dict[str, Any] | None:
    """The form of the answer, at its present place or at the one that it had before."""
    wanted = value_of(fields, "output_config", dict[str, Any], {}).get("format")
    wanted = wanted or value_of(fields, "output_format", dict[str, Any])
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        name = FIELDS.names["response_format"]
        raise bad_request("unsupported_parameter", f"{name}: type is json_schema", name)
    return {"schema": wanted.get("schema")}


def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/messages. max_tokens may be more than there is room for, for clients must
    always name one; and thoughts that a model does not have are within any budget."""
    if body.thinking_token_budget is not None and not answer_grammar.takes_budget(served):
        body = msgspec.structs.replace(body, thinking_token_budget=None)
    try:
        roomy = replace(served, fits=True)
        return FIELDS.renaming(lambda: chat.read(body, roomy))
    except ClientError as error:
        if error.code not in TOO_LONG:
            raise
        message = f"prompt is too long: {error.message}"  # in words that their clients know
        raise ClientError(error.status, error.code, message, error.param) from None


def count_tokens(raw: bytes, served: ServedModel, doing: Callable[[str], None]) -> bytes:
    """The answer of /v1/messages/count_tokens."""
    fields = fields_of(raw, served.limits)
    body = _chat({name: value for name, value in fields.items() if name != "max_tokens"}, NO_LIMITS)
    check_model(body, served)
    check = _fits_tokenizer(served)
    tokens = FIELDS.renaming(lambda: chat.chat_tokens(body, served, check))
    return encode({"input_tokens": len(tokens)})


def _fits_tokenizer(served: ServedModel) -> Callable[[str], None]:
    return lambda text: check_size(len(text), "the text", "characters", served.limits)


# -- answers ---------------------------------------------------------------------------------------
def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


PING = _event("ping")


def _usage(reply: Reply, stream: OutputStream, output: int) -> dict[str, Any]:
    """The prompt in two parts: what was in the cache, and the rest. Thoughts are counted where
    there can be any."""
    reader = reply.readers.get(stream.choice)
    thinks = output and reader is not None and reader.thinks
    details = {"thinking_tokens": reasoning_tokens([stream], reply.readers)}
    return {
        "input_tokens": len(stream.request.prompt) - stream.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stream.cached,
        "output_tokens": output,
        **({"output_tokens_details": details} if thinks else {}),
    }


def _stopped(reply: Reply, stream: OutputStream, parts: AnswerParts) -> dict[str, Any]:
    """Return the fields that say why the answer ended."""
    sequence = stream.stop_reason if isinstance(stream.stop_reason, str) else None
    reason = STOP_REASONS.get(stream.finish or "", stream.finish)
    if stream.finish == "stop" and parts.calls:
        reason = "tool_use"
    elif sequence is not None:
        reason = "stop_sequence"
    elif stream.finish == "length" and len(stream.tokens) < (reply.call.body.max_tokens or 0):
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _message(
    reply: Reply, content: list[Any], why: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    head = {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}
    return {**head, "content": content, **why, "usage": usage}


def _signature(part: AnswerPart) -> str:
    """Return a signature for a thinking block: clients ignore thinking without one. It is not
    checked here."""
    return hashlib.blake2b(part.text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _block(reply: Reply, part: AnswerPart) -> dict[str, Any]:
    """Return one complete content block."""
    if part.kind == CONTENT:
        return {"type": "text", "text": part.text}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": _signature(part)}
    id = call_id(reply, 0, part.call, "toolu_")
    input: Any = json_object(part.text) or {}
    return {"type": "tool_use", "id": id, "name": part.name, "input": input}


def whole(reply: Reply, streams: list[OutputStream], answer: WholeAnswer) -> InParts[bytes]:
    """The body of an answer that is not streamed."""
    yield
    stream = streams[0]
    parts = parts_of(reply, stream, answer)
    content = [_block(reply, part) for part in parts.parts]
    used = _usage(reply, stream, len(stream.tokens))
    return encode(_message(reply, content, _stopped(reply, stream, parts), used))


def begin(reply: Reply, stream: OutputStream) -> bytes:
    """The beginning of the message, and of its one block where it can have no others."""
    if not reply.begins(stream):
        return b""
    nothing = {"stop_reason": None, "stop_sequence": None}
    begun = _message(reply, [], nothing, _usage(reply, stream, 0))
    made = _event("message_start", message=begun)
    if reply.call.answer is None:
        made += _block_event(reply, reply.state(AnswerParts).begin(CONTENT))
    return made + PING


def chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """The events of one piece: before the first token `begin`, behind the last one the ends."""
    stream, parts, made = piece.stream, reply.state(AnswerParts), [begin(reply, piece.stream)]
    made += [_block_event(reply, event) for event in read_piece(reply, parts, piece)]
    if piece.last:
        usage = _usage(reply, stream, len(stream.tokens))
        made += [
            _event("message_delta", delta=_stopped(reply, stream, parts), usage=usage),
            _event("message_stop"),
        ]
    return b"".join(made)


def _block_event(reply: Reply, event: PartEvent) -> bytes:
    """The events of what is new in one block."""
    part, index = event.part, event.part.index
    if event.kind == "begin":
        empty = _block(reply, replace(part, texts=[]))
        if part.kind == REASONING:
            empty["signature"] = ""
        return _event("content_block_start", index=index, content_block=empty)
    if event.kind == "more":
        kind, name = DELTAS[part.kind]
        return _event("content_block_delta", index=index, delta={"type": kind, name: event.text})
    signed = b""
    if part.kind == REASONING:
        delta = {"type": "signature_delta", "signature": _signature(part)}
        signed = _event("content_block_delta", index=index, delta=delta)
    return signed + _event("content_block_stop", index=index)


DELTAS = {
    CONTENT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}


def failed(_: Reply, error: ClientError) -> bytes:
    """The event of a failure in the middle."""
    return (
        b"event: error\ndata: " + anthropic_error(error.status, error.code, error.message) + b"\n\n"
    )


MESSAGES = Dialect(
    id_prefix="msg",
    shape=ReplyShape("message"),
    read=read,
    whole=whole,
    chunk=chunk,
    begin=begin,
    alive=PING,
    failed=failed,
    end=no_end,
    separator="_",
    decode=decode,
)
