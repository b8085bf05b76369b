"""The limits of what one request may cost, by name: told from how much it asks for, before any of
it is done.

Owns the limits, the prices, and what is said of a request that is beyond them: always a 400,
because sending it again would not help. Must not know where a request comes from, nor what its
fields mean beyond their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.errors import ClientError
from pageturner.http.request_info import SAFE_ID
from pageturner.params import MAX_LOGPROBS, SamplingParams
from pageturner.text import parameters

UNKNOWN = 1 << 40  # where a size is not known, it limits nothing
LONGEST_NAME = 256  # characters of what a client calls its users and its caches
OPEN_REQUESTS = (
    16  # all unfinished requests together may hold as many entries as so many of the dearest ones
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of what one request may ask for.

    prompts   in one request
    choices   answers to all of its prompts: as many as this server ever takes
    context   tokens of one prompt and its answer
    vocabulary  how many tokens there are
    values    numbers, texts, lists and objects in one field of its JSON that is no list of tokens
              or prompts
    entries   that reshape logits (text/parameters.py, `entries`), over all choices
    logprobs  to be told, over all choices
    text      characters that /tokenize takes, and token ids that /detokenize takes
    """

    prompts: int = UNKNOWN
    choices: int = UNKNOWN
    context: int = UNKNOWN
    vocabulary: int = UNKNOWN
    values: int = UNKNOWN
    entries: int = UNKNOWN
    logprobs: int = UNKNOWN
    text: int = UNKNOWN


NO_LIMITS = RequestLimits()


def check_prompts(count: int, limits: RequestLimits) -> None:
    """Raise ClientError if a request has more prompts than allowed."""
    if count > limits.prompts:
        message = (
            f"the request has {count} prompts and {limits.prompts} are taken: send several requests"
        )
        raise _refused(
            "too_many_prompts", f"{message}, or raise --max-prompts-per-request", "prompt"
        )


def check_choices(prompts: int, made: int, limits: RequestLimits) -> None:
    """Raise ClientError if a request makes more choices than this server ever takes at once."""
    if prompts * made > limits.choices:
        message = (
            f"{prompts} prompts with {made} answers each are more than the {limits.choices} that this server"
            " ever takes at once: send several requests, or raise --max-queue"
        )
        raise _refused("too_many_choices", message, "n" if made > 1 else "prompt")


def check_price(
    params: SamplingParams, prompts: list[int], made: int, limits: RequestLimits
) -> None:
    """ClientError where the answers to one request are dearer than one request may be.

    params   of one choice, resolved
    prompts  tokens of each
    made     answers to each prompt, or the beams that are followed at once to find them
    """
    one, choices = parameters.entries(params), made * len(prompts)
    if one * choices > limits.entries and choices > 1:  # one answer may name every token
        message = (
            "logit_bias, allowed_token_ids, stop_token_ids and bad_words have"
            f" {one} entries for each of {choices} answers, and a request may have {limits.entries} in all:"
            " send fewer, or ask for fewer answers, or raise --max-logit-entries-per-request"
        )
        raise _refused("request_too_costly", message, _dearest(params))
    rows = 0
    if params.logprobs is not None:
        rows += choices * (params.max_tokens or 0) * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        rows += sum(prompts) * made * (params.prompt_logprobs + 1)
    if rows > max(
        limits.logprobs, (MAX_LOGPROBS + 1) * limits.context
    ):  # one answer always has its own
        message = (
            f"the request may have to tell {rows} logprobs, and {limits.logprobs} are told in one: lower"
            " max_tokens, n, or the number of logprobs, or raise --max-logprobs-per-request"
        )
        raise _refused("request_too_costly", message, "logprobs")


def _dearest(params: SamplingParams) -> str:
    sizes = {
        "logit_bias": len(params.logit_bias or ()),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "stop_token_ids": len(params.stop_ids),
        "bad_words": parameters.WORD_ENTRIES * len(params.bad_words_token_ids),
    }
    return max(sizes, key=lambda name: sizes[name])


def check_tokens_json(raw: bytes, name: str, limits: RequestLimits) -> None:
    """ClientError where a field that says something of single tokens has more of them than there
    are."""
    if len(raw) // 2 >= limits.vocabulary:
        strings, others = count_values(raw, 2 * limits.vocabulary)
        if (
            strings + others > 3 * limits.vocabulary + 2
        ):  # an entry of logit_bias is three: a colon, too
            message = f"{name} has more entries than the {limits.vocabulary} tokens that there are: send fewer"
            raise _refused("too_many_values", message, name)


def check_values(raw: bytes, most: int, name: str) -> None:
    """Raise ClientError if some JSON holds more values than `most`, without decoding any of
    them."""
    if len(raw) // 2 < most:  # each takes two bytes at least
        return
    strings, others = count_values(raw, most)
    if strings + others > most:
        message = f"{name} holds more than {most} values: send less, or raise --max-json-values"
        raise _refused("too_many_values", message, name)


def count_values(raw: bytes, most: int) -> tuple[int, int]:
    """Return how many strings are in some JSON, and how many of its places are no strings: lists,
    objects, numbers and the rest. Where there are more than `most` strings the others are not
    counted. A few passes over the bytes, and nothing is made of them."""
    strings, outside = _strings_and_rest(raw, most)
    places = (
        outside.count(b",") + outside.count(b":") + outside.count(b"[") + outside.count(b"{") + 1
    )
    return strings, max(places - strings, 0)


def _strings_and_rest(raw: bytes, most: int) -> tuple[int, bytes]:
    """Return how many strings are in some JSON, and all that stands outside of them: nothing where
    there are more than `most` strings."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = raw.count(b'"') // 2
    return strings, b"".join(raw.split(b'"')[::2]) if strings <= most else b""


def check_prompt_json(raw: bytes, truncated: bool, limits: RequestLimits) -> None:
    """ClientError where the `prompt` of a request has more prompts, or more tokens, than can ever
    run. Told without making any of them. truncated: the beginnings of long prompts are cut off
    anyway."""
    if raw[:1] != b"[" or len(raw) // 2 < min(limits.prompts, limits.context):
        return
    prompts, outside = _strings_and_rest(raw, limits.prompts)
    check_prompts(prompts, limits)
    prompts += outside.count(b"[") - 1
    check_prompts(prompts, limits)
    places = outside.count(b",") + 1
    if prompts and places > prompts and b"[" not in outside[1:]:
        check_prompts(places, limits)  # texts and what is none
    if places > max(prompts, 1) * limits.context and not truncated:
        message = f"{maximum(limits.context)}, answer included, and prompt has {places} tokens: shorten the prompt"
        raise _refused("context_length_exceeded", message, "prompt")


def maximum(tokens: int) -> str:
    """Return how a message about too long a prompt begins: clients know these words, and try
    another model."""
    return f"This model's maximum context length is {tokens} tokens"


def check_size(length: int, name: str, what: str, limits: RequestLimits) -> None:
    """Raise ClientError if a text, or a list of tokens, is too long to tokenize or detokenize."""
    if length > limits.text:
        message = (
            f"{name} has {length} {what} and {limits.text} are taken at once: send it in parts"
        )
        raise ClientError(400, "text_too_long", message)


def check_id(name: str, value: str | None) -> None:
    """ClientError for what cannot be an id: it becomes part of paths, headers and the log."""
    if value is not None and not SAFE_ID.fullmatch(value):
        raise _refused("invalid_value", f"{name} must be 1 to 128 letters, digits and ._:-", name)


def check_name(name: str, value: str | None) -> None:
    """ClientError for a name that is too long to be kept."""
    if value is not None and len(value) > LONGEST_NAME:
        message = f"{name} has {len(value)} characters and may have {LONGEST_NAME}"
        raise _refused("invalid_value", f"{message}: send a digest of it", name)


def _refused(code: str, message: str, param: str) -> ClientError:
    return ClientError(400, code, message, param)
