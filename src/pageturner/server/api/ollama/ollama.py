"""/api/chat and /api/generate: Ollama's API.

Owns its fields and options, and the shape of its answers: lines of JSON. Must not know what all
APIs have in common (call.py, replies.py), nor its small endpoints (ollama_pages.py).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from pageturner.errors import ClientError
from pageturner.http.error_responses import ollama_error
from pageturner.server.admission.limits import RequestLimits
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
from pageturner.server.api.base.call import (
    Call,
    Reader,
    check_model,
    check_prompt,
    check_text,
    finished,
    sampling_params,
    with_max_tokens,
)
from pageturner.server.api.base.dialect import Dialect, no_end
from pageturner.server.api.base.replies import (
    InParts,
    Reply,
    ReplyShape,
    TokenLogprob,
    encode,
)
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import (
    FIELD_MAPS,
    Fields,
    fields_of,
    fields_within,
    refuse,
    value_of,
)
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai import chat
from pageturner.server.api.openai.fim import read_gap
from pageturner.text import parameters
from pageturner.text.output_stream import OutputPiece, OutputStream

NDJSON = b"application/x-ndjson"
LATEST = ":latest"  # which their clients put behind a name without a tag
EFFORTS = ("low", "medium", "high", "max")
OPTIONS = FIELD_MAPS["ollama options"]
_MAP = FIELD_MAPS["ollama"]
FIELDS = msgspec.structs.replace(
    _MAP, names={ours: f"options.{theirs}" for theirs, ours in OPTIONS.options.items()} | _MAP.names
)
NO_LIMIT = (-1, -2)  # of num_predict: until the end, until the context is full


# -- requests --------------------------------------------------------------------------------------
def model_of(fields: Fields) -> str | None:
    """The model that a request names, without the tag that their clients put behind it."""
    model: str | None = value_of(fields, "model", str)
    return model and model.removesuffix(LATEST)


def _decoder(
    says: Callable[[Fields], dict[str, Any]],
) -> Callable[[bytes, RequestLimits], RequestBody]:
    """Return the decoder of a body. says: makes our fields of the prompt or messages."""

    def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
        fields = fields_of(raw, limits)
        ours = FIELDS.passed_on(fields) | says(fields) | _options(fields) | _thinking(fields)
        ours["stream"] = value_of(fields, "stream", bool, True)
        ours["model"] = model_of(fields)
        if (form := value_of(fields, "format", str | dict[str, Any], "")) != "":
            ours["response_format"] = _response_format(form)
        body = FIELDS.to_openai_request(ours, limits)
        body.context = value_of(fields, "context", list[int])
        return body

    return decode


def _options(fields: Fields) -> dict[str, Any]:
    """The fields of ours that `options` says. ClientError names an option that would change the
    answer and is not there."""
    if "options" not in fields:
        return {}
    options = fields_within(bytes(fields["options"]), "options")
    refuse(options, OPTIONS.neutral)
    if unknown := options.keys() - OPTIONS.own:
        name = min(unknown)
        raise bad_request(
            "unsupported_parameter", f"options: {name[:64]!r} is not known here", "options"
        )
    if value_of(options, "num_predict", int | float) in NO_LIMIT:
        del options["num_predict"]
    return OPTIONS.optional(options)


def _response_format(form: str | dict[str, Any]) -> dict[str, Any]:
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, str):
        raise bad_request(
            "invalid_value", f"format is json or a JSON schema, not {form[:40]!r}", "format"
        )
    return {"type": "json_schema", "json_schema": {"schema": form}}


def _thinking(fields: Fields) -> dict[str, Any]:
    """`think`, as chats have it."""
    think = value_of(fields, "think", bool | str)
    given = value_of(fields, "chat_template_kwargs", dict[str, Any], {})
    ours = {"chat_template_kwargs": given}
    if isinstance(think, str):
        if think not in EFFORTS:
            raise bad_request(
                "invalid_value", f"think is true, false, {', '.join(EFFORTS)}", "think"
            )
        ours["reasoning_effort"] = think
    elif think:
        ours["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True, **given}
    elif think is False:
        ours["reasoning_effort"] = "none"
    return ours


def _says_chat(fields: Fields) -> dict[str, Any]:
    messages = value_of(fields, "messages", list[dict[str, Any]], [])
    for i, message in enumerate(messages):
        if message.pop("images", None):
            where = f"messages[{i}].images"
            raise bad_request(
                "unsupported_parameter", f"{where} is not supported yet: leave it out", "messages"
            )
        message["content"] = message.get("content") or ""
        for theirs, ours in (("thinking", "reasoning_content"), ("tool_name", "name")):
            if theirs in message:
                message[ours] = message.pop(theirs)
    return {"messages": messages} | ({"tools": fields["tools"]} if "tools" in fields else {})


def _says_generate(fields: Fields) -> dict[str, Any]:
    """`prompt` where it is sent as it is, else a conversation of it."""
    refuse(fields, {"tools": ([],)}, "is for /api/chat")
    prompt, system = value_of(fields, "prompt", str, ""), value_of(fields, "system", str, "")
    if suffix := value_of(fields, "suffix", str, ""):  # a gap needs no template, and has no system
        return {"prompt": prompt, "suffix": suffix}
    if value_of(fields, "raw", bool, False):
        return {"prompt": prompt}
    said = (("system", system), ("user", prompt))
    return {"messages": [{"role": role, "content": text} for role, text in said if text]}


def _behind_context(read: Reader, body: RequestBody, served: ServedModel) -> Call:
    """The call that `read` makes, behind the tokens of `context`. num_predict 0: the prompt is
    computed and nothing said."""
    nothing = body.max_tokens == 0
    if nothing:
        body = msgspec.structs.replace(body, max_tokens=1)
    call = read(body, served)
    if body.context:
        prompt = tuple(check_prompt([*body.context, *call.prompts[0]], "context", served))
        fitted = with_max_tokens(call.params[0], len(prompt), body.max_tokens, served)
        call = replace(call, prompts=(prompt,), params=(fitted,))
    return replace(call, only_echoes=nothing or call.only_echoes)


@FIELDS.renames
def read_chat(body: RequestBody, served: ServedModel) -> Call:
    """A call of /api/chat."""
    _check_thinks(body, served)
    return _behind_context(chat.read, body, served)


@FIELDS.renames
def read_generate(body: RequestBody, served: ServedModel) -> Call:
    """A call of /api/generate: a gap, or through the template where the model has one and the
    request wants it."""
    if body.suffix:
        return read_gap(body, served)
    _check_thinks(body, served)
    if body.prompt is None and served.template is not None:
        return _behind_context(chat.read, body, served)
    if body.prompt is None:
        texts = [message["content"] for message in body.messages or ()]
        body = msgspec.structs.replace(body, prompt="\n\n".join(texts))
    return _behind_context(_read_text, body, served)


def _check_thinks(body: RequestBody, served: ServedModel) -> None:
    """ClientError where thoughts are asked of a model that has none."""
    asked = (body.chat_template_kwargs or {}).get("enable_thinking") is True
    asked = asked or body.reasoning_effort not in (None, "none")
    if asked and answer_grammar.formats_of(served).reasoning is None:
        message = (
            "think: it is not known how this model thinks: start the server with --reasoning-parser"
        )
        raise bad_request("unsupported_parameter", message, "think")


def _read_text(body: RequestBody, served: ServedModel) -> Call:
    assert isinstance(body.prompt, str)
    text = body.prompt
    check_model(body, served)
    parameters.check_number("logprobs", body.top_logprobs, "top_logprobs")
    parameters.check_number("max_tokens", body.max_tokens)
    wanted = None
    if body.logprobs:
        wanted = body.top_logprobs or 0
    params = sampling_params(body, served, wanted)
    check_text(text, "prompt", body, served)
    tokens = served.tokenizer.encode(text, add_special=True, parse_special=True)
    prompt = tuple(check_prompt(tokens, "prompt", served))
    return finished(Call(body, (prompt,), (params,)), body.max_tokens, served)


# -- answers ---------------------------------------------------------------------------------------
def created_at() -> str:
    """Now, as their answers say it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


# text and what else there is -> what a line says
Said = Callable[[str, dict[str, Any]], dict[str, Any]]


def _chat_said(text: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, **more}}


def _generated_said(text: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"response": text, **more}


def _whole_said(reply: Reply, parts: AnswerParts, said: Said) -> dict[str, Any]:
    """A whole answer."""
    more: dict[str, Any] = {}
    if thoughts := parts.text(REASONING):
        more["thinking"] = thoughts
    if calls := [call for part in parts.of_kind(CALL) if (call := _call(reply, part)) is not None]:
        more["tool_calls"] = calls
    return said(parts.text(CONTENT), more)


def _new_said(reply: Reply, event: PartEvent, said: Said) -> dict[str, Any] | None:
    """Return the line for a change to the answer, if there is one yet: a tool call is sent only
    when it is complete."""
    part = event.part
    if part.kind == CALL:
        call = _call(reply, part) if event.kind == "end" else None
        return None if call is None else said("", {"tool_calls": [call]})
    if event.kind != "more":
        return None
    return said(event.text, {}) if part.kind == CONTENT else said("", {"thinking": event.text})


def _call(reply: Reply, part: AnswerPart) -> dict[str, Any] | None:
    """Return a tool call; None if the answer was cut off within it."""
    arguments = json_object(part.text)
    if arguments is None:
        return None
    function = {"index": part.call, "name": part.name, "arguments": arguments}
    return {"id": call_id(reply, 0, part.call), "function": function}


def _logprobs(reply: Reply, known: list[TokenLogprob]) -> dict[str, Any]:
    """Logprobs of these tokens, where the client wants them."""
    if reply.logprobs is None or not known:
        return {}
    entries = [chat.logprob_entry(reply, token, value) for token, value in known if value]
    return {"logprobs": entries}


def _line(model: str, said: dict[str, Any], stream: OutputStream | None = None) -> bytes:
    """One line. stream: the answer, where it is the last one."""
    line = {"model": model, "created_at": created_at(), **said, "done": stream is not None}
    return encode(line if stream is None else line | _figures(stream))


def _figures(stream: OutputStream) -> dict[str, Any]:
    """Return the statistics in the last line of an answer: token counts, and times in
    nanoseconds."""
    times, now = stream.times, time.monotonic()
    first = times.first_at or now
    return {
        "done_reason": stream.finish,
        "total_duration": _ns(now - times.arrival),
        "load_duration": max(_ns(times.submitted_at - times.arrival), 1),
        "prompt_eval_count": len(stream.request.prompt),
        "prompt_eval_duration": _ns(first - times.arrival),
        "eval_count": len(stream.tokens),
        "eval_duration": _ns(now - first),
    }


def _ns(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)


def _dialect(
    name: str,
    says: Callable[[Fields], dict[str, Any]],
    read: Reader,
    said: Said,
) -> Dialect:
    """says: our fields of what is asked; said: where a line has its text."""

    def context(stream: OutputStream) -> dict[str, Any]:
        """The tokens so far, which a next request may go on from."""
        if says is not _says_generate:
            return {}
        return {"context": [*stream.request.prompt, *stream.tokens]}

    def whole(reply: Reply, streams: list[OutputStream], answer: WholeAnswer) -> InParts[bytes]:
        yield
        stream = streams[0]
        parts = parts_of(reply, stream, answer)
        told = _logprobs(reply, chat.known_of(stream))
        line = _whole_said(reply, parts, said) | told | context(stream)
        return _line(reply.model, line, stream)

    def chunk(reply: Reply, piece: OutputPiece) -> bytes:
        new = [
            _new_said(reply, event, said)
            for event in read_piece(reply, reply.state(AnswerParts), piece)
        ]
        told = [one for one in new if one is not None]
        if known := _logprobs(reply, chat.known_logprobs(piece)):
            told = told or [said("", {})]
            told[0] |= known
        lines = [_line(reply.model, one) + b"\n" for one in told]
        if piece.last:
            line = said("", {}) | context(piece.stream)
            lines.append(_line(reply.model, line, piece.stream) + b"\n")
        return b"".join(lines)

    return Dialect(
        id_prefix=name,
        shape=ReplyShape(name),
        read=read,
        whole=whole,
        chunk=chunk,
        begin=lambda reply, stream: b"",  # its clients take every line for JSON
        alive=b"",
        failed=_failed,
        end=no_end,
        media_type=NDJSON,
        decode=_decoder(says),
    )


def _failed(_: Reply, error: ClientError) -> bytes:
    return ollama_error(error.status, error.code, error.message) + b"\n"


OLLAMA_CHAT = _dialect("ollama-chat", _says_chat, read_chat, _chat_said)
OLLAMA_GENERATE = _dialect("ollama-generate", _says_generate, read_generate, _generated_said)
