"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, for text.

Owns its fields, and the shape of its answers and events. Must not know what all APIs have in common (call.py,
replies.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pageturner.errors import ClientError
from pageturner.serve import chat
from pageturner.serve.body import RequestBody, bad_request
from pageturner.serve.call import Call, ServedModel, check_model
from pageturner.serve.dialect import Dialect
from pageturner.serve.error_responses import anthropic_error
from pageturner.serve.limits import LONGEST_NAME, NO_LIMITS, RequestLimits, check_size
from pageturner.serve.replies import InParts, Reply, ReplyShape, encode
from pageturner.serve.translate import Fields, fields_of, others, refuse, renaming, understood, value_of
from pageturner.serve.whole_answer import WholeAnswer
from pageturner.text.output_stream import OutputPiece, OutputStream

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")  # fields that are ours as they are
TAKEN = frozenset({
    *SAME, "messages", "system", "stop_sequences", "metadata", "output_config", "output_format", "thinking",
    "cache_control", "service_tier",
})  # fmt: skip
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "mcp_servers": ([],),
    "container": (),
}
SILENT_THINKING = ("disabled", "adaptive")  # it may be left out; "enabled" asks for it
OF_THE_PAST = frozenset({"thinking", "redacted_thinking"})  # blocks that no later turn is given
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


# -- requests ------------------------------------------------------------------------------------------------
def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a chat."""
    fields = fields_of(raw, limits)
    for name in ("max_tokens", "messages"):
        if name not in fields:
            raise bad_request("missing_field", f"{name} is missing", name)
    return _chat(fields, limits)


def _chat(fields: Fields, limits: RequestLimits) -> RequestBody:
    refuse(fields, NEUTRAL)
    _check_thinking(fields)
    ours = others(fields, TAKEN) | {name: fields[name] for name in SAME if name in fields}
    ours["messages"] = _messages(fields)
    if stops := value_of(fields, "stop_sequences", list[str], []):
        ours["stop"] = stops
    user = value_of(fields, "metadata", dict[str, Any], {}).get("user_id")
    if isinstance(user, str) and 0 < len(user) <= LONGEST_NAME:
        ours["user"] = user
    if (form := _format(fields)) is not None:
        ours["response_format"] = {"type": "json_schema", "json_schema": form}
    return understood(ours, NAMES, limits)


def _check_thinking(fields: Fields) -> None:
    thinking = value_of(fields, "thinking", dict[str, Any], {})
    if thinking.get("type", "disabled") not in SILENT_THINKING:
        message = 'thinking is not supported yet: leave it out, or send {"type": "disabled"}'
        raise bad_request("unsupported_parameter", message, "thinking")


def _format(fields: Fields) -> dict[str, Any] | None:
    """The form of the answer, at its present place or at the one that it had before."""
    wanted = value_of(fields, "output_config", dict[str, Any], {}).get("format")
    wanted = wanted or value_of(fields, "output_format", dict[str, Any])
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        name = NAMES["response_format"]
        raise bad_request("unsupported_parameter", f"{name}: type is json_schema", name)
    return {"schema": wanted.get("schema")}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, behind what the system says."""
    system = value_of(fields, "system", str | list[dict[str, Any]], "")
    said = [{"role": "system", "content": _text(system, "system")}] if system else []
    messages = value_of(fields, "messages", list[dict[str, Any]], [])
    if messages and messages[-1].get("role") == "assistant":
        message = "messages: the last one is the assistant's, and going on with it is not supported yet"
        raise bad_request("unsupported_parameter", message, "messages")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request("invalid_value", f"messages[{i}].role is user or assistant", "messages")
        said.append({"role": role, "content": _text(content, f"messages[{i}].content")})
    return said


def _text(content: Any, where: str) -> str:
    """The text of some content: a string, or blocks."""
    if isinstance(content, str):
        return content
    name = where.partition("[")[0]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request("invalid_type", f"{where} must be a string or a list of blocks", name)
    texts = []
    for i, block in enumerate(content):
        kind = str(block.get("type"))
        if kind in OF_THE_PAST:
            continue
        if kind != "text":
            message = f"{where}[{i}]: blocks of type {kind[:40]!r} are not supported yet, only text"
            raise bad_request("unsupported_parameter", message, name)
        if not isinstance(block.get("text"), str):
            raise bad_request("invalid_type", f"{where}[{i}].text must be a string", name)
        texts.append(block["text"])
    return "\n".join(texts)


def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/messages."""
    return renaming(NAMES, lambda: chat.read(body, served))


def count_tokens(raw: bytes, served: ServedModel, doing: Callable[[str], None]) -> bytes:
    """The answer of /v1/messages/count_tokens."""
    fields = fields_of(raw, served.limits)
    body = _chat({name: value for name, value in fields.items() if name != "max_tokens"}, NO_LIMITS)
    check_model(body, served)
    tokens = chat.chat_tokens(
        body, served, lambda text: check_size(len(text), "the text", "characters", served.limits)
    )
    return encode({"input_tokens": len(tokens)})


# -- answers -------------------------------------------------------------------------------------------------
def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _usage(stream: OutputStream, output: int) -> dict[str, int]:
    """The prompt in two parts: what was in the cache, and the rest."""
    return {
        "input_tokens": len(stream.request.prompt) - stream.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stream.cached,
        "output_tokens": output,
    }


def _stopped(stream: OutputStream) -> dict[str, Any]:
    """Why it ended."""
    sequence = stream.stop_reason if isinstance(stream.stop_reason, str) else None
    reason = "stop_sequence" if sequence is not None else STOP_REASONS.get(stream.finish or "", stream.finish)
    return {"stop_reason": reason, "stop_sequence": sequence}


def _message(reply: Reply, content: list[Any], why: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
    head = {"id": reply.about()["id"], "type": "message", "role": "assistant", "model": reply.model}
    return {**head, "content": content, **why, "usage": usage}


def whole(reply: Reply, streams: list[OutputStream], answer: WholeAnswer) -> InParts[bytes]:
    """The body of an answer that is not streamed."""
    yield
    stream = streams[0]
    content = [{"type": "text", "text": answer.texts[0]}]
    return encode(_message(reply, content, _stopped(stream), _usage(stream, len(stream.tokens))))


def chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """The events of one piece: before the first token the beginning of the message and of its one block,
    behind the last one their ends."""
    stream, parts = piece.stream, []
    if reply.begins(stream):
        nothing = {"stop_reason": None, "stop_sequence": None}
        parts += [
            _event("message_start", message=_message(reply, [], nothing, _usage(stream, 0))),
            _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            _event("ping"),
        ]
    if piece.text:
        delta = {"type": "text_delta", "text": piece.text}
        parts.append(_event("content_block_delta", index=0, delta=delta))
    if piece.last:
        usage = _usage(stream, len(stream.tokens))
        parts += [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=_stopped(stream), usage=usage),
            _event("message_stop"),
        ]
    return b"".join(parts)


def long_chunk(reply: Reply, piece: OutputPiece) -> InParts[bytes]:
    """`chunk`: nothing of it is long."""
    yield
    return chunk(reply, piece)


def failed(_: Reply, error: ClientError) -> bytes:
    """The event of a failure in the middle."""
    return b"event: error\ndata: " + anthropic_error(error.status, error.code, error.message) + b"\n\n"


def end(_: Reply, streams: list[OutputStream]) -> bytes:
    """Nothing: message_stop was the end."""
    return b""


MESSAGES = Dialect(
    id_prefix="msg",
    shape=ReplyShape(whole_object="message", chunk_object="message", content=lambda text: {"text": text}),
    read=read,
    whole=whole,
    chunk=chunk,
    long_chunk=long_chunk,
    failed=failed,
    end=end,
    separator="_",
    decode=decode,
)
