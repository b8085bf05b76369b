"""Request bodies: the OpenAI fields, and vLLM's extensions, as JSON.

Owns names and types of request fields. Must not know what they mean.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from pageturner.errors import ClientError
from pageturner.params import LARGEST
from pageturner.server.admission.limits import (
    NO_LIMITS,
    RequestLimits,
    check_id,
    check_name,
    check_prompt_json,
    check_tokens_json,
    check_values,
)
from pageturner.server.api.base.foreign_fields import FOREIGN_NAMES, UNSUPPORTED
from pageturner.server.api.base.misspelt import Spelling

log = logging.getLogger("pageturner")
T = TypeVar("T")
MAX_VALUES = 1 << 16  # in the body of a small endpoint
MAX_NUMBER = 2**63 - 1
MAX_SEED = 2**64 - 1
MAX_EXACT = 2**53  # of the whole numbers that a double can tell apart
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # say that bytes are not
MAX_NEUTRAL = 64  # bytes of a value that changes nothing
MAX_TOLD = 400  # characters of what is wrong with a field: some of it may be the field itself
SMALL = 1024  # bytes of a body that cannot hold too much of anything
# pieces of JSON text in which no surrogate is alone, and as a group one that is
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})", re.DOTALL
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# a whole number from 1 that goes between processes
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class EmbeddingOptions(msgspec.Struct, frozen=True):
    """Options of an embedding: how its vector is pooled, normalized and encoded."""

    pooling: Literal["mean", "last", "cls"] = "mean"
    normalize: bool = True
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    embed_dtype: Literal["float32", "float16"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"


class PairOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for scoring pairs of a query and a document, and for what the response contains.

    by         "cosine" of their embeddings, or "yes_no": the probability that the model says yes
    queries    number of texts that are queries; they come before the documents
    yes        token id of the answer "yes"
    documents  texts of the documents, if the client wants them in the response
    top_n      number of best documents to return; None: all
    most       maximum number of tokens of a document
    listed     the answer is a list of indexes and scores, as TEI writes it
    """

    by: Literal["auto", "cosine", "yes_no"] = "auto"
    queries: int = 1
    yes: int = 0
    instruction: str = ""
    most: int | None = None
    documents: list[str] | None = None
    top_n: int | None = None
    pooling: Literal["mean", "last", "cls"] = "mean"
    listed: bool = False


class ExtraFile(msgspec.Struct, frozen=True):
    """A text that stands before a gap that is to be filled, as another file would."""

    text: str = ""
    filename: str = "tmp"


class SessionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Session fields of a request: its session, and how long its KV is kept. Times are in
    seconds."""

    id: str
    keep: bool | float | None = None
    next_in: float | None = None
    fork_of: str | None = None
    supersede: bool = False
    release: bool = False


class RequestBody(msgspec.Struct, kw_only=True):
    """The fields that are understood, of both endpoints; None: not given."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    suffix: str | None = None
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
    truncation_side: Literal["left", "right"] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    thinking_token_budget: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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
    session: str | SessionFields | None = None
    # not fields of a body: those of a dialect
    embedding: EmbeddingOptions | None = None
    pairs: PairOptions | None = None
    extra: list[ExtraFile] | None = None
    context: list[int] | None = None


DIALECTS_OWN = frozenset({"embedding", "pairs", "extra", "context"})
OURS = frozenset(RequestBody.__struct_fields__) - DIALECTS_OWN
_KNOWN = OURS | UNSUPPORTED.keys()
# each field as it stands in the body; whatever else is there is passed over, and nothing is made of
# it
_Fields = msgspec.defstruct(
    "_Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(_KNOWN)]
)
_SPELLING = Spelling(_KNOWN - UNSUPPORTED.keys())
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRUCT = msgspec.json.Decoder(_Fields)
_KINDS = get_type_hints(RequestBody)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(kind) for name, kind in _KINDS.items()
}
_IDS = frozenset({"stop_token_ids", "logit_bias", "allowed_token_ids", "force_ids"})
# names of vLLM before it had `structured_outputs`, and of llama.cpp -> what they are in there
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
# fields of any size: nothing of them is kept once they are understood
BULKY = (
    _IDS
    | GUIDED.keys()
    | {
        "prompt",
        "suffix",
        "extra",
        "context",
        "messages",
        "stop",
        "bad_words",
        "response_format",
        "structured_outputs",
        "chat_template",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
    }
)
NAMED = 32 * 1024  # bytes of a body up to which the unknown fields in it are looked at


def decode(raw: bytes, limits: RequestLimits = NO_LIMITS) -> RequestBody:
    """The fields of a JSON body. Unknown ones are ignored, and named in the log where the body is
    no long one; a known one misspelt is refused there. What holds more than any request may is
    refused before it is made into anything."""
    try:
        fields = _OBJECT.decode(raw) if len(raw) <= NAMED else _known(raw)
    except msgspec.ValidationError:
        raise bad_request("invalid_json", "the body must be a JSON object") from None
    except NOT_JSON as error:
        raise bad_request(
            "invalid_json", f"the body is not valid JSON: {why_not_json(raw, error)}"
        ) from None
    return body_of({name: bytes(value) for name, value in fields.items()}, limits)


def body_of(fields: dict[str, bytes], limits: RequestLimits) -> RequestBody:
    """The request that these fields are, each as JSON. See `decode`."""
    size = sum(len(name) + len(value) for name, value in fields.items())
    fields = _without_unknown(fields, named=size <= NAMED)
    _refuse_unsupported(fields)
    if size > SMALL:
        _check_sizes(fields, limits)
    body = RequestBody(**{name: _value(name, value) for name, value in fields.items()})
    _take_guided(body)
    if body.stream_options is not None and not body.stream:
        message = "stream_options is for streams: send stream: true with it, or leave it out"
        raise bad_request("invalid_value", message, "stream_options")
    check_id("request_id", body.request_id)
    check_name("user", body.user)
    check_name("cache_salt", body.cache_salt)
    return body


def _take_guided(body: RequestBody) -> None:
    """Make `structured_outputs` of what older names say. A client that cannot know which of them a
    server has sends both (guidance does), which is one form as long as they say the same."""
    older = {
        ours: value
        for name, ours in GUIDED.items()
        if (value := getattr(body, name)) is not None and (name != "grammar" or value)
    }
    if not older:
        return
    wanted = body.structured_outputs
    if wanted is None:
        body.structured_outputs = older
    elif any(wanted.get(ours) != value for ours, value in older.items()):
        name = next(name for name, ours in GUIDED.items() if ours in older)
        message = f"{name} and structured_outputs say what the answer must match, each something else: send one"
        raise bad_request("invalid_value", message, name)


def _without_unknown(fields: dict[str, bytes], named: bool) -> dict[str, bytes]:
    """The known fields of a body. named: a line in the log names the others, and a slip is
    refused."""
    unknown = sorted(fields.keys() - _KNOWN)
    if unknown and named:
        if slip := _SPELLING.meant(unknown):
            message = f"{slip[0]} is not a field here: did you mean {slip[1]}?"
            raise bad_request("unsupported_parameter", message, slip[0])
        log.info("ignored unknown fields: %s", ", ".join(map(_printable, unknown[:20])))
    return {name: value for name, value in fields.items() if name in _KNOWN}


def _known(raw: bytes) -> dict[str, msgspec.Raw]:
    """The known fields of a body that may have very many others."""
    fields = _STRUCT.decode(raw)
    return {name: value for name in _KNOWN if bytes(value := getattr(fields, name))}


def _check_sizes(fields: dict[str, bytes], limits: RequestLimits) -> None:
    for name in BULKY & fields.keys():
        if name == "prompt":
            truncated = fields.get("truncate_prompt_tokens", b"null") != b"null"
            check_prompt_json(fields[name], truncated, limits)
            if truncated and fields.get("truncation_side") != b'"right"':
                fields[name] = _last_ids(fields[name], limits.context)
        elif name in _IDS:
            check_tokens_json(fields[name], name, limits)
        else:
            check_values(fields[name], max(limits.values, SMALL), name)


def _last_ids(raw: bytes, most: int) -> bytes:
    """Return only the end of a list of token ids if it is longer than could ever be kept."""
    if raw[:1] != b"[" or b'"' in raw or raw.find(b"[", 1) > 0 or len(raw) // 2 < most:
        return raw
    parts = raw.rsplit(b",", most)
    return b"[" + b",".join(parts[1:]) if len(parts) > most else raw


def _value(name: str, raw: bytes) -> Any:
    """Decode the value of one field. Raises ClientError if it is invalid."""
    try:
        value = _DECODERS[name].decode(raw)
        if name == "prompt" and isinstance(value, list):  # of which any type is decoded
            value = _PROMPT.decode(raw)
    except msgspec.ValidationError as error:
        value = with_whole_numbers(raw, _KINDS[name])
        if value is not None:
            return value
        message = str(error).partition(" - at `$")[0][:MAX_TOLD]
        raise bad_request(
            "invalid_type", f"{name}: {message[:1].lower()}{message[1:]}", name
        ) from None
    except NOT_JSON as error:
        raise bad_request(
            "invalid_json", f"{name} is not valid JSON: {why_not_json(raw, error)}", name
        ) from None
    most = MAX_SEED if name == "seed" else MAX_NUMBER  # it may have to go between processes
    if isinstance(value, int) and abs(value) > most:
        raise bad_request("invalid_value", f"{name} must be a number of at most 64 bits", name)
    return value


def _whole(text: str) -> int | float:
    """Read whole numbers such as 2.0 as integers: some languages write them so."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= MAX_EXACT else number


_ANYTHING = msgspec.json.Decoder(float_hook=_whole)
_PROMPT = msgspec.json.Decoder(list[Any], float_hook=_whole)


def with_whole_numbers(raw: bytes, kind: Any) -> Any:
    """Decode JSON as this type, accepting whole numbers written as 2.0; None if it does not fit."""
    try:
        return msgspec.convert(_ANYTHING.decode(raw), kind)
    except NOT_JSON:
        return None


def json_or_none(raw: bytes, kind: type[T]) -> T | None:
    """JSON as this type; None where it is no such JSON."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON:
        return None


def why_not_json(raw: bytes, error: Exception) -> str:
    """Explain why some JSON is invalid. The decoder does not name a lone surrogate, which comes
    from text that was cut in the middle of a character, so this does."""
    found = _SURROGATES.search(raw) if isinstance(error, msgspec.DecodeError) else None
    while found is not None and found[1] is None:
        found = _SURROGATES.search(raw, found.end())
    if found is None:
        return str(error)
    half = found[1].decode("latin-1")
    return f"{half} (byte {found.start()}) is half of a surrogate pair, which no text can hold: leave it out"


def _refuse_unsupported(fields: dict[str, bytes]) -> None:
    """Refuse what is known and not there yet; what is neutral of it is taken out."""
    for name in [name for name in fields if name in UNSUPPORTED]:
        raw = fields.pop(name)
        if len(raw) <= MAX_NEUTRAL and any(
            _same(raw, neutral) for neutral in (None, *UNSUPPORTED[name])
        ):
            continue
        what = FOREIGN_NAMES.get(name, "not supported yet: leave it out")
        raise bad_request("unsupported_parameter", f"{name} is {what}", name)


def _same(raw: bytes, neutral: Any) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def without_bulk(body: RequestBody) -> RequestBody:
    """The body without what its prompts and parameters have been made of: an answer that is under
    way should not keep it."""
    return msgspec.structs.replace(body, **dict.fromkeys(BULKY))


def convert(raw: bytes, kind: type[T], most: int = MAX_VALUES) -> T:
    """A JSON body of one of the small endpoints, of at most so many values. ClientError where it is
    not one."""
    check_values(raw, most, "the body")
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON as error:
        found: T | None = with_whole_numbers(raw, kind)
        if found is None:
            raise bad_request("invalid_json", str(error)) from None
        return found


def _printable(name: str) -> str:
    return repr(name[:64])


def bad_request(code: str, message: str, param: str | None = None) -> ClientError:
    """A 400."""
    return ClientError(400, code, message, param)
