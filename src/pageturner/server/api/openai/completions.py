"""/v1/completions: a prompt, or several, and the text that follows each.

Owns what is special to this API: how prompts are written, and the shape of its answers and chunks.
Must not know what all APIs have in common (call.py, replies.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pageturner.server.admission.limits import check_prompts
from pageturner.server.api.base.answer_grammar import refuse_tools
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
from pageturner.server.api.openai.fim import check_gap, gap_prompt, with_ends
from pageturner.text import parameters
from pageturner.text.detokenizer import prompt_offsets
from pageturner.text.output_stream import OutputPiece, OutputStream

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions; a chat may use the rest of the context


def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/completions."""
    check_model(body, served)
    refuse_tools(body)
    if body.prompt is None:
        raise bad_request("missing_field", "prompt is missing", "prompt")
    if isinstance(body.logprobs, bool):
        raise bad_request("invalid_type", "logprobs: expected `int | null`, got `bool`", "logprobs")
    asked = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    only_echoes = bool(body.echo) and asked == 0
    asked = 1 if only_echoes else asked
    parameters.check_number("max_tokens", asked)
    params = sampling_params(body, served, body.logprobs)
    if body.suffix:
        check_gap(body)
        params = with_ends(params, body, served)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    prompts, texts = _prompts(body.prompt, body, served, asked or DEFAULT_MAX_TOKENS)
    call = Call(
        body=body,
        prompts=prompts,
        params=(params,),
        echoes=texts if body.echo else (),
        only_echoes=only_echoes,
    )
    return finished(call, asked, served, DEFAULT_MAX_TOKENS)


def _prompts(
    prompt: str | list[Any], body: RequestBody, served: ServedModel, answer: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Text, texts, token ids, or lists of token ids: the tokens of each prompt, and its text."""
    if isinstance(prompt, list) and not prompt:
        raise bad_request("empty_prompt", "the prompt is empty: send at least one token", "prompt")
    ids = isinstance(prompt, list) and _is_ids(prompt)
    several: list[Any] = [prompt] if isinstance(prompt, str) or ids else prompt
    check_prompts(len(several), served.limits)
    special = body.add_special_tokens is not False
    found, texts = [], []
    for one in several:
        if not isinstance(one, str) and not (isinstance(one, list) and _is_ids(one)):
            raise bad_request(
                "invalid_type",
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
                "prompt",
            )
        if isinstance(one, str):
            check_text(one, "prompt", body, served)
        tokens: Any = one
        if body.suffix:
            tokens = gap_prompt(one, body, served)
        elif isinstance(one, str):
            tokens = served.tokenizer.encode(one, add_special=special, parse_special=True)
        kept = check_prompt(truncate_prompt(tokens, body, served, answer), "prompt", served)
        found.append(tuple(kept))
        if body.echo:
            whole = isinstance(one, str) and len(kept) == len(tokens)
            texts.append(str(one) if whole else served.tokenizer.decode(kept, skip_special=False))
    return tuple(found), tuple(texts)


def _is_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def whole(reply: Reply, streams: list[OutputStream], whole_answer: WholeAnswer) -> InParts[bytes]:
    """The body of an answer that is not streamed."""
    choices = []
    for i, stream in enumerate(reply.best(streams)):
        choices.append((yield from _choice(reply, i, stream, whole_answer)))
    return reply.body(choices, streams)


def _choice(
    reply: Reply, index: int, stream: OutputStream, whole_answer: WholeAnswer
) -> InParts[dict[str, Any]]:
    echo = reply.echo(stream)
    known, offsets = _echoed_tokens(reply, stream)
    known += zip(stream.tokens, stream.logprobs, strict=False)
    offsets += [len(echo) + offset for offset in whole_answer.offsets[stream.choice]]
    choice = {
        "index": index,
        "text": echo + whole_answer.texts[stream.choice],
        "logprobs": (yield from _logprobs(reply, known, offsets)),
        "finish_reason": stream.finish,
        "stop_reason": stream.stop_reason,
        **UNASKED,
        **(yield from reply.prompt_logprobs(stream)),
    }
    return choice | reply.token_ids(stream)


def chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """The event of one token; the echo stands in the first one, the reason of the end in the last
    one."""
    if piece.token is None and not piece.text and not piece.last:
        return b""
    stream = piece.stream
    if reply.template is not None and not (piece.last and stream.finish is not None):
        echo = reply.echo(stream) if reply.begins(stream) else ""
        return reply.template.event(stream.choice, echo + piece.text)
    return at_once(long_chunk(reply, piece))


def long_chunk(reply: Reply, piece: OutputPiece) -> InParts[bytes]:
    """`chunk`, in parts."""
    stream = piece.stream
    finish = stream.finish if piece.last else None
    first = reply.begins(stream)
    echo = reply.echo(stream) if first else ""
    known, offsets = _echoed_tokens(reply, stream) if first else ([], [])
    if piece.token is not None and reply.logprobs is not None:
        known.append((piece.token, stream.logprobs[piece.n - 1]))
        offsets.append(len(reply.echo(stream)) + piece.offset)
    choice: dict[str, Any] = {
        "index": stream.choice,
        "text": echo + piece.text,
        **((yield from reply.prompt_logprobs(stream)) if first else {}),
        "logprobs": (yield from _logprobs(reply, known, offsets)) if known else None,
        "finish_reason": finish,
    }
    if finish is not None:
        choice["stop_reason"] = stream.stop_reason
    return reply.event(
        [choice | reply.piece_ids(piece, prompt=first)], reply.usage_so_far(piece.stream, piece.n)
    )


def _echoed_tokens(reply: Reply, stream: OutputStream) -> tuple[list[TokenLogprob], list[int]]:
    """Logprobs of an echoed prompt and where its tokens begin; nothing is known of the first
    token."""
    count, prompt, echo = reply.logprobs, stream.request.prompt, reply.echo(stream)
    if count is None or not reply.call.echoes:
        return [], []
    values = [None, *((value, top[:count]) for value, _, top in stream.prompt_logprobs)]
    return list(zip(prompt, values, strict=True)), prompt_offsets(reply.tokenizer, prompt, echo)


def _logprobs(
    reply: Reply, known: list[TokenLogprob], offsets: list[int]
) -> InParts[dict[str, Any] | None]:
    if reply.logprobs is None:
        return None
    top = (None if value is None else reply.top_logprobs(token, value) for token, value in known)
    return {
        "tokens": (yield from json_list(reply.token_text(token) for token, _ in known)),
        "token_logprobs": [None if value is None else finite(value[0]) for _, value in known],
        "top_logprobs": (yield from json_list(top)),
        "text_offset": offsets,
    }


COMPLETIONS = Dialect(
    id_prefix="cmpl",
    shape=ReplyShape(
        whole_object="text_completion",
        content=lambda text: {"text": text},
    ),
    read=read,
    whole=whole,
    chunk=chunk,
    long_chunk=long_chunk,
)
