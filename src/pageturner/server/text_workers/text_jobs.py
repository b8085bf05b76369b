"""The work on the text of a request, and how its outcome goes from one process to another.

Owns the jobs: a body in, bytes out, the same whether a text worker does them or the server itself.
Must not know which of the two does one, nor processes and sockets.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from pageturner.errors import ClientError, refusing
from pageturner.params import SamplingParams
from pageturner.server.admission.limits import check_id, check_name, check_size
from pageturner.server.api.anthropic import messages
from pageturner.server.api.base import answer_grammar, replies
from pageturner.server.api.base.body import MAX_VALUES, SMALL, RequestBody, bad_request, convert
from pageturner.server.api.base.call import Call, check_model
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import InParts
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.ollama import ollama, ollama_embed
from pageturner.server.api.openai import chat, completions, embeddings, infill, rerank
from pageturner.server.api.openai.chat_fields import (
    chat_prompt,
    template_variables,
    with_request_template,
)
from pageturner.server.api.responses import responses
from pageturner.text.answer_format import AnswerFormat

Doing = Callable[[str], None]
MAX_MADE = 1 << 20  # answers to one prompt: more than any server takes
GRAMMAR, TEXT = "grammar", "text"  # what a job may be doing


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /tokenize. With `content` in place of `prompt` they are llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    with_pieces: bool = False
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /detokenize."""

    tokens: list[int]
    model: str | None = None


class PrefixBody(msgspec.Struct, kw_only=True):
    """Fields of POST /v1/prefixes and of a line of --preload. The prefix is a prompt, or a
    conversation without the beginning of an answer."""

    id: str | None = None
    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


class ReadPrefix(msgspec.Struct, frozen=True):
    """A prefix, understood: its tokens as an array of 32 bits each. adapter: its name, None
    without."""

    id: str | None
    cache_salt: str | None
    tokens: bytes
    adapter: str | None = None


class PackedCall(msgspec.Struct, frozen=True):
    """A Call without what its choices have in common said once for each. tokens: of each prompt, as
    arrays of 32 bits; max_tokens: of each prompt, the only parameter that differs between them."""

    body: RequestBody
    tokens: list[bytes]
    params: SamplingParams
    max_tokens: list[int | None]
    made: int
    kept: int
    logprobs: int | None
    echoes: list[str]
    only_echoes: bool
    answer: AnswerFormat | None


# -- calls -----------------------------------------------------------------------------------------
def read_call(dialect: Dialect, raw: bytes, served: ServedModel, doing: Doing) -> bytes:
    """A packed call. ClientError for what is wrong with the request."""
    body = dialect.decode(raw, served.limits)
    if answer_grammar.asks(body):
        # which is checked here, and remembered; what is wrong is said when its turn comes
        doing(GRAMMAR)
        with contextlib.suppress(ClientError):
            answer_grammar.grammar_of(body, served)
        doing(TEXT)
    return pack_call(dialect.read(body, served))


def pack_call(call: Call) -> bytes:
    """The call as bytes, without the fields of its body that nobody reads any more."""
    params = call.params[:: call.made]
    assert all(replace(one, max_tokens=params[0].max_tokens) == params[0] for one in params[1:])
    packed = PackedCall(
        body=call.body,
        tokens=[array("I", prompt).tobytes() for prompt in call.prompts[:: call.made]],
        params=params[0],
        max_tokens=[one.max_tokens for one in params],
        made=call.made,
        kept=call.kept,
        logprobs=call.logprobs,
        echoes=list(call.echoes[:: call.made]),
        only_echoes=call.only_echoes,
        answer=call.answer,
    )
    return msgspec.msgpack.encode(packed)


def unpack_call(packed: bytes) -> InParts[Call]:
    """The call that `pack_call` was given, without those fields; one prompt after another.
    ClientError where it is none."""
    with refusing(_senseless):
        told = msgspec.msgpack.decode(packed, type=PackedCall)
        return (yield from _unpacked(told))


def _senseless(why: str) -> ClientError:
    return ClientError(
        503, "busy", "the process that read this request broke: ask again", None, 1.0
    )


def _unpacked(told: PackedCall) -> InParts[Call]:
    made, prompts = told.made, list[tuple[int, ...]]()
    if (
        not 1 <= told.kept <= made <= MAX_MADE
        or not told.tokens
        or len(told.max_tokens) != len(told.tokens)
    ):
        raise ValueError("no call")
    of_length = {length: replace(told.params, max_tokens=length) for length in set(told.max_tokens)}
    for tokens in told.tokens:
        prompts += [_tokens(tokens)] * made
        yield
    return Call(
        body=told.body,
        prompts=tuple(prompts),
        params=tuple(of_length[length] for length in told.max_tokens for _ in range(made)),
        made=made,
        kept=told.kept,
        logprobs=told.logprobs,
        echoes=tuple(echo for echo in told.echoes for _ in range(made)),
        only_echoes=told.only_echoes,
        answer=told.answer,
    )


def _tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(array("I", packed))


# -- prefixes --------------------------------------------------------------------------------------
def read_prefix(raw: bytes, served: ServedModel, doing: Doing) -> bytes:
    """A ReadPrefix, as msgpack."""
    most = max(MAX_VALUES, min(served.context, served.capacity) + SMALL)
    body = convert(raw, PrefixBody, most)
    check_id("id", body.id)
    check_name("cache_salt", body.cache_salt)
    tokens = array("I", prefix_tokens(body, served)).tobytes()
    adapter = body.model if body.model in served.adapters else None
    return msgspec.msgpack.encode(ReadPrefix(body.id, body.cache_salt, tokens, adapter))


class KnownPrefix(NamedTuple):
    """A prefix as it was asked for: its id, its cache salt, its tokens and the name of its
    adapter."""

    id: str | None
    salt: str | None
    tokens: tuple[int, ...]
    adapter: str | None


def unpack_prefix(packed: bytes) -> KnownPrefix:
    """Return what a text worker says of one."""
    with refusing(_senseless):
        told = msgspec.msgpack.decode(packed, type=ReadPrefix)
        return KnownPrefix(told.id, told.cache_salt, _tokens(told.tokens), told.adapter)


def prefix_tokens(body: PrefixBody, served: ServedModel) -> tuple[int, ...]:
    """The tokens of a prefix. ClientError names the field that is wrong."""
    special = body.add_special_tokens
    if body.messages is not None:
        kwargs = body.chat_template_kwargs
        call = RequestBody(
            model=body.model,
            messages=body.messages,
            chat_template_kwargs=kwargs,
            max_tokens=1,
            add_special_tokens=special,
            add_generation_prompt=False,
        )
        return chat.read(call, served).prompts[0]
    call = RequestBody(
        model=body.model, prompt=body.prompt, add_special_tokens=special, max_tokens=1
    )
    return completions.read(call, served).prompts[0]


# -- tokens of a text, text of tokens --------------------------------------------------------------
def tokenize(raw: bytes, served: ServedModel, doing: Doing) -> bytes:
    """The answer of /tokenize."""
    body = convert(raw, TokenizeBody)
    check_model(RequestBody(model=body.model), served)
    tokens = _tokenized(body, served)
    shown = None
    if body.return_token_strs:
        texts = {token: served.tokenizer.text_of(token) for token in set(tokens)}
        shown = [texts[token] for token in tokens]
    named: list[Any] = tokens
    if body.with_pieces:
        named = [
            {"id": token, "piece": _piece(served.tokenizer.token_bytes(token))} for token in tokens
        ]
    return replies.encode(
        {
            "count": len(tokens),
            "max_model_len": served.context,
            "tokens": named,
            "token_strs": shown,
        }
    )


def _piece(raw: bytes) -> str | list[int]:
    """The text of a token, or its bytes where these are no whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def apply_template(raw: bytes, served: ServedModel, doing: Doing) -> bytes:
    """The answer of /apply-template, which is llama.cpp's: the text of the prompt."""
    body = _conversation(convert(raw, TokenizeBody))
    text, mark = chat_prompt(body, with_request_template(body, served))
    check_size(len(text), "the text", "characters", served.limits)
    return replies.encode({"prompt": text.replace(mark, "")})


def _conversation(body: TokenizeBody) -> RequestBody:
    return RequestBody(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
        tool_choice=body.tool_choice,
        reasoning_effort=body.reasoning_effort,
        chat_template=body.chat_template,
        continue_final_message=body.continue_final_message,
    )


def _tokenized(body: TokenizeBody, served: ServedModel) -> list[int]:
    def check(text: str) -> None:
        check_size(len(text), "the text", "characters", served.limits)

    messages = _conversation(body)
    if body.messages is not None:
        return chat.chat_tokens(messages, served, check)
    template_variables(messages)  # refused beside a prompt too, where they say nothing
    special = body.add_special_tokens is not False
    if body.prompt is None and body.content is not None:
        body.prompt = body.content
        special = bool(body.add_special)
    if body.prompt is None:
        raise bad_request("missing_field", "prompt or messages is missing", "prompt")
    check(body.prompt)
    parse = body.parse_special is not False
    return served.tokenizer.encode(body.prompt, add_special=special, parse_special=parse)


def detokenize(raw: bytes, served: ServedModel, doing: Doing) -> bytes:
    """The answer of /detokenize."""
    body = convert(raw, DetokenizeBody, served.limits.text + SMALL)
    check_model(RequestBody(model=body.model), served)
    check_size(len(body.tokens), "tokens", "ids", served.limits)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < served.vocab_size:
        raise bad_request("invalid_value", f"token ids are 0 to {served.vocab_size - 1}", "tokens")
    text = served.tokenizer.decode_whole(body.tokens, skip_special=False)
    return replies.encode({"prompt": text, "content": text})


# -- all of them -----------------------------------------------------------------------------------
# path -> what is spoken there
SPOKEN: dict[str, Dialect] = {
    "/v1/completions": completions.COMPLETIONS,
    "/v1/chat/completions": chat.CHAT_COMPLETIONS,
    "/v1/messages": messages.MESSAGES,
    "/v1/responses": responses.RESPONSES,
    "/v1/embeddings": embeddings.EMBEDDINGS,
    "/v1/rerank": rerank.RERANK,
    "/v2/rerank": rerank.RERANK,
    "/v1/reranking": rerank.RERANK,
    "/v1/score": rerank.SCORE,
    "/infill": infill.INFILL,
    "/api/chat": ollama.OLLAMA_CHAT,
    "/api/generate": ollama.OLLAMA_GENERATE,
    "/api/embed": ollama_embed.OLLAMA_EMBED,
    "/api/embeddings": ollama_embed.OLLAMA_EMBEDDINGS,
}
DIALECTS = {one.id_prefix: one for one in SPOKEN.values()}
PAGES: dict[str, Callable[[bytes, ServedModel, Doing], bytes]] = {
    "tokenize": tokenize,
    "detokenize": detokenize,
    "apply_template": apply_template,
    "prefix": read_prefix,
    "count_tokens": messages.count_tokens,
}


def do(name: str, raw: bytes, served: ServedModel, doing: Doing = lambda _: None) -> bytes:
    """The job of this name: one of PAGES, or the reading of a call in the dialect of this
    id_prefix. doing: is told what it is about when that changes."""
    if name in PAGES:
        return PAGES[name](raw, served, doing)
    return read_call(DIALECTS[name], raw, served, doing)
