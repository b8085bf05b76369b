"""What clients send: the OpenAI fields, and vLLM's beyond them, as JSON.

Owns names and types of request fields. Must not know what they mean.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal, TypeVar

import msgspec

from pageturner.errors import ClientError

log = logging.getLogger("pageturner")
T = TypeVar("T")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(msgspec.Struct, kw_only=True):
    """The fields that are understood, of both endpoints; None: not given."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    user: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    forced_end: int | None = None
    force_ids: list[int] | None = None
    inject_fault: str | None = None
    speculation: bool | None = None
    timings: bool | None = None
    receipt: bool | None = None


# known, and not there yet: field -> values that change nothing and are taken
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "vllm_xargs": ({},),
    "spaces_between_special_tokens": (True,),
}
_KNOWN = frozenset(RequestBody.__struct_fields__) | frozenset(UNSUPPORTED)


def decode(raw: bytes) -> RequestBody:
    """The fields of a JSON body. Unknown ones are named in the log and ignored."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise bad_request("invalid_json", "the body must be a JSON object")
    unknown = fields.keys() - _KNOWN
    if unknown:
        log.info("ignored unknown fields: %s", ", ".join(sorted(map(_printable, unknown))[:20]))
    _refuse_unsupported(fields)
    try:
        return msgspec.convert(fields, RequestBody)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", path)[0]
        raise bad_request(
            "invalid_type", f"{name}: {message[:1].lower()}{message[1:]}", name or None
        ) from None


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = fields.get(name)
        if value is None or any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral
        ):
            continue
        raise bad_request("unsupported_parameter", f"{name} is not supported yet: leave it out", name)


def convert(raw: bytes, kind: type[T]) -> T:
    """A JSON body of one of the small endpoints. ClientError where it is not one."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", str(error)) from None


def _printable(name: str) -> str:
    return repr(name[:64])


def bad_request(code: str, message: str, param: str | None = None) -> ClientError:
    """A 400."""
    return ClientError(400, code, message, param)
