"""A chat's answer that is more than content: calls of tools and thoughts, whole and in events.

Owns where they stand in OpenAI's JSON. Must not know how they are found in the text
(text/answer_format.py), nor what else a chat's answer holds (chat.py).
"""

from __future__ import annotations

from typing import Any

from pageturner.server.api.base.answer_parts import (
    CALL,
    CONTENT,
    REASONING,
    call_id,
    note_token,
    parts_of,
    reader_of,
)
from pageturner.server.api.base.replies import Reply
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.text.call_parser import Delta
from pageturner.text.output_stream import OutputPiece, OutputStream


def message(reply: Reply, stream: OutputStream, answer: WholeAnswer) -> dict[str, Any]:
    """The whole message of one choice."""
    text, echo = answer.texts[stream.choice], reply.echo(stream)
    if reply.call.answer is None:
        return _said(reply, echo + text, "")
    parts = parts_of(reply, stream, answer)
    calls_cut = bool(reply.call.answer.tools) and reader_of(reply, stream).cut
    content, thoughts = echo + parts.text(CONTENT), parts.text(REASONING)
    calls = [_call(reply, stream, part.call, part.name, part.text) for part in parts.of_kind(CALL)]
    said = content if content or not (calls or calls_cut) else None
    whole = _said(reply, said, thoughts)
    return {**whole, "tool_calls": calls} if calls else whole


def _said(reply: Reply, content: str | None, thoughts: str) -> dict[str, Any]:
    """A message without calls: `reasoning` is null where there are no thoughts, and is not there
    where nobody wants them."""
    whole: dict[str, Any] = {"role": "assistant", "content": content}
    if reply.call.body.include_reasoning is False:
        return whole
    return whole | (_thoughts(thoughts) if thoughts else {"reasoning": None})


def events(reply: Reply, piece: OutputPiece, logprobs: dict[str, Any] | None) -> bytes:
    """The events of one piece. What is known of its token stands in the first of them, and in one
    of its own where the piece says nothing yet."""
    stream, reader = piece.stream, reader_of(reply, piece.stream)
    note_token(reader, piece)
    before = reader.calls
    deltas: list[dict[str, Any]] = []
    last = piece.last and stream.failure is None
    for new in reader.read(piece.text, last, stream.finish != "stop"):
        before += new.kind == "call"
        if new.kind == REASONING and reply.call.body.include_reasoning is False:
            continue
        deltas.append(_delta(reply, stream, before - 1, new))
    more = reply.piece_ids(piece, prompt=False)
    if not deltas and (logprobs is not None or more.get("token_ids")):
        deltas.append({})
    made = []
    for i, delta in enumerate(deltas):
        choice = {"index": stream.choice, "delta": delta, "logprobs": None, "finish_reason": None}
        if i == 0:
            choice |= {"logprobs": logprobs, **more}
        made.append(reply.event([choice], reply.usage_so_far(stream, piece.n)))
    return b"".join(made)


def finish_reason(reply: Reply, stream: OutputStream) -> str | None:
    """Return the finish reason. As in OpenAI's API, a forced call of a named function ends with
    "stop"."""
    answer = reply.call.answer
    if answer is None or stream.finish != "stop":
        return stream.finish
    return "tool_calls" if reader_of(reply, stream).calls and not answer.named else "stop"


def _delta(reply: Reply, stream: OutputStream, index: int, delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return _thoughts(delta.text)
    if delta.kind == "call":
        return {"tool_calls": [{"index": index, **_call(reply, stream, index, delta.text)}]}
    return {"tool_calls": [{"index": index, "function": {"arguments": delta.text}}]}


def _thoughts(text: str) -> dict[str, Any]:
    """Under both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _call(
    reply: Reply, stream: OutputStream, index: int, name: str, arguments: str = ""
) -> dict[str, Any]:
    """A call, with as many of its arguments as are known."""
    id = call_id(reply, stream.choice, index)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
