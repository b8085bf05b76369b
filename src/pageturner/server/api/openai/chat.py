"""/v1/chat/completions: a conversation, through the model's own template, and what the assistant
says next.

Owns what is special to this API: how messages become a prompt, and the shape of its answers and
chunks. Must not know what all APIs have in common (call.py, replies.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pageturner.request import Logprob
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.call import (
    Call,
    check_model,
    check_prompt,
    check_text,
    finished,
    sampling_params,
    truncate_prompt,
)
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import (
    InParts,
    Reply,
    ReplyShape,
    TokenLogprob,
    at_once,
    finite,
    json_list,
)
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.whole_answer import UNASKED, WholeAnswer
from pageturner.server.api.openai import chat_fields
from pageturner.server.api.openai.chat_answer import events, finish_reason, message
from pageturner.server.api.openai.chat_fields import chat_prompt, read_answer, with_request_template
from pageturner.text import parameters
from pageturner.text.conversation import prompt_tokens
from pageturner.text.output_stream import OutputPiece, OutputStream


def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/chat/completions."""
    check_model(body, served)
    served = with_request_template(body, served)
    if body.logprobs is not None and not isinstance(body.logprobs, bool):
        raise bad_request("invalid_type", "logprobs: expected `bool | null`, got `int`", "logprobs")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
    parameters.check_number("logprobs", body.top_logprobs, "top_logprobs")
    asked = body.max_completion_tokens
    if asked is None:
        asked = body.max_tokens
    parameters.check_number("max_tokens", asked)
    params = sampling_params(body, served, (body.top_logprobs or 0) if body.logprobs else None)
    check = partial(check_text, name="messages", body=body, served=served)
    text, mark = chat_prompt(body, served)
    check(text)
    tokens = prompt_tokens(served.tokenizer, text, mark, bool(body.add_special_tokens))
    tokens = truncate_prompt(tokens, body, served, asked or 1)
    prompt = tuple(check_prompt(tokens, "messages", served))
    params, answer = read_answer(params, body, text, served)
    call = Call(body, (prompt,), (params,), echoes=chat_fields.echoes(body), answer=answer)
    return finished(call, asked, served)


def chat_tokens(
    body: RequestBody, served: ServedModel, check: Callable[[str], object]
) -> list[int]:
    """The tokens of a conversation, through the model's own template. check: refuses the text that
    is too long, before it is tokenised."""
    text, mark = chat_prompt(body, with_request_template(body, served))
    check(text)
    return prompt_tokens(served.tokenizer, text, mark, bool(body.add_special_tokens))


def whole(reply: Reply, streams: list[OutputStream], whole_answer: WholeAnswer) -> InParts[bytes]:
    """The body of an answer that is not streamed."""
    choices = []
    for i, stream in enumerate(reply.best(streams)):
        choices.append((yield from _choice(reply, i, stream, whole_answer)))
    told = {**UNASKED, **(yield from reply.prompt_logprobs(streams[0]))}
    told |= reply.prompt_ids(streams[0])
    return reply.body(choices, streams, told)


def _choice(
    reply: Reply, index: int, stream: OutputStream, whole_answer: WholeAnswer
) -> InParts[dict[str, Any]]:
    choice = {
        "index": index,
        "message": message(reply, stream, whole_answer),
        "logprobs": (yield from _logprobs(reply, known_of(stream))),
        "finish_reason": finish_reason(reply, stream),
        "stop_reason": stream.stop_reason,
    }
    return choice | reply.token_ids(stream)


def chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """The events of one piece: before the first token the role, then the token, and behind the last
    token the reason of the end."""
    stream, parts = piece.stream, []
    if reply.begins(stream):
        parts.append(at_once(_role(reply, stream)))
    if reply.call.answer is not None:
        parts.append(events(reply, piece, at_once(_logprobs(reply, known_logprobs(piece)))))
    elif piece.token is not None or piece.text:
        parts.append(_token(reply, piece))
    if piece.last:
        end = {
            "index": stream.choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_reason(reply, stream),
            "stop_reason": stream.stop_reason,
        }
        if stream.finish is None:
            del end["stop_reason"]
        parts.append(reply.event([end], reply.usage_so_far(stream, piece.n)))
    return b"".join(parts)


def long_chunk(reply: Reply, piece: OutputPiece) -> InParts[bytes]:
    """`chunk`, in parts."""
    role = (yield from _role(reply, piece.stream)) if reply.begins(piece.stream) else b""
    return role + chunk(reply, piece)


def _role(reply: Reply, stream: OutputStream) -> InParts[bytes]:
    choice: dict[str, Any] = {
        "index": stream.choice,
        "delta": {"role": "assistant", "content": reply.echo(stream)},
        "logprobs": None,
        "finish_reason": None,
    }
    ids = reply.prompt_ids(stream)
    told = {**(yield from reply.prompt_logprobs(stream)), **ids}
    return reply.event([choice | ids], reply.usage_so_far(stream, 0), told)


def _token(reply: Reply, piece: OutputPiece) -> bytes:
    stream = piece.stream
    if reply.template is not None:
        return reply.template.event(stream.choice, piece.text)
    choice: dict[str, Any] = {
        "index": stream.choice,
        "delta": {"content": piece.text},
        "logprobs": at_once(_logprobs(reply, known_logprobs(piece))),
        "finish_reason": None,
    }
    return reply.event(
        [choice | reply.piece_ids(piece, prompt=False)], reply.usage_so_far(stream, piece.n)
    )


def known_of(stream: OutputStream) -> list[TokenLogprob]:
    """Return the logprobs of the tokens that an answer shows."""
    known: list[TokenLogprob] = list(zip(stream.tokens, stream.logprobs, strict=False))
    return known[: len(known) - stream.hidden]


def known_logprobs(piece: OutputPiece) -> list[TokenLogprob]:
    """Return the logprobs of the token of a piece; empty if it has none to show."""
    if piece.token is None or not piece.stream.logprobs or (piece.last and piece.stream.hidden):
        return []
    return [(piece.token, piece.stream.logprobs[piece.n - 1])]


def _logprobs(reply: Reply, known: list[TokenLogprob]) -> InParts[dict[str, Any] | None]:
    if reply.logprobs is None or not known:
        return None
    entries = (logprob_entry(reply, token, value) for token, value in known if value is not None)
    return {"content": (yield from json_list(entries))}


def logprob_entry(reply: Reply, token: int, value: Logprob) -> dict[str, Any]:
    likely = [_entry(reply, other, logprob) for other, logprob in value[1]]
    return {**_entry(reply, token, value[0]), "top_logprobs": likely}


def _entry(reply: Reply, token: int, logprob: float) -> dict[str, Any]:
    raw = reply.tokenizer.token_bytes(token)
    return {"token": reply.token_text(token), "logprob": finite(logprob), "bytes": list(raw)}


CHAT_COMPLETIONS = Dialect(
    id_prefix="chatcmpl",
    shape=ReplyShape(
        whole_object="chat.completion",
        chunk_object="chat.completion.chunk",
        content=lambda text: {"delta": {"content": text}},
    ),
    read=read,
    whole=whole,
    chunk=chunk,
    long_chunk=long_chunk,
)
