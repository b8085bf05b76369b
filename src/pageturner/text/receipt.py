"""Receipts: of what an answer was made and what it became, as hashes, so that anybody can make it
again.

Owns the form of a receipt: its fields, their canonical bytes, how they are hashed and signed, and
what is wrong with a receipt that was changed. Must not know HTTP, where a model lies or how an
answer is made again (server/receipts.py, lab/commands/verify.py). docs/receipts.md explains it to
users.

    checks     eight hex digits for each part, in the order of their names: which part was changed
    digest     SHA-256 of the canonical bytes of all parts: whether any was
    signature  HMAC-SHA256 of the same bytes: whether somebody without the key changed them
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from pageturner.params import SamplingParams

VERSION = 1
BLOCK = 16  # tokens between two links of a chain, or twice as many as often as it takes
MAX_LINKS = 128  # of one answer's chain: it is at most 1 KiB
CHECK = 8  # hex digits that tell a changed part
SEALS = ("checks", "digest", "signature")

_Number = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,20}$")]


class ReceiptInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings by which text became tokens and tokens text. add_special_tokens: None where the
    request did not say; echo: the prompt stands in front of the answers' texts."""

    add_special_tokens: bool | None
    add_generation_prompt: bool
    skip_special_tokens: bool
    echo: bool


class ReceiptParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Everything that tokens depend on, resolved, named as in SamplingParams. Words are tokens
    already.

    n, best_of  answers to each prompt: how many are in the receipt, of how many that were made
    seed        as text, because JSON of some languages holds 53 bits only
    max_thinking_tokens, thinking_begin, thinking_end  only there where they were asked for
    """

    n: int
    best_of: int
    seed: _Number
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None
    truncate_prompt_tokens: int | None
    include_stop_str_in_output: bool
    beam_width: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    structured_outputs: str | None
    forced_end: int | None
    force_ids: tuple[int, ...]
    max_thinking_tokens: int | None = None
    thinking_begin: tuple[int, ...] = ()
    thinking_end: tuple[int, ...] = ()


# those that decide how an answer is made again, and are called and written as in SamplingParams
_AS_THEY_ARE = tuple(
    name
    for name in ReceiptParams.__struct_fields__
    if name not in ("n", "best_of", "seed", "ignore_eos", "truncate_prompt_tokens")
)


class ReceiptPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt. tokens: how many, behind truncation; max_tokens: of an answer to it, 0: only its
    echo."""

    tokens: int
    hash: str
    max_tokens: int


class ReceiptChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer. tokens: how many, as usage counts them; chain: `token_chain`, with a link every
    `block`."""

    index: int
    prompt: int
    finish_reason: str
    tokens: int
    hash: str
    block: int
    chain: str


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """key: which key it was, not the key itself."""

    algorithm: Literal["hmac-sha256"]
    key: str
    value: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of one answer, with all its choices. `object`: as in the answer, its dialect."""

    version: int
    id: str
    object: str
    created: int
    model: str
    model_hash: str
    fingerprint: str
    adapter: str
    input: ReceiptInput
    params: ReceiptParams
    prompts: tuple[ReceiptPrompt, ...]
    choices: tuple[ReceiptChoice, ...]
    checks: str = ""
    digest: str = ""
    signature: Signature | None = None


class Difference(NamedTuple):
    """part: the path of a field, as `params.seed` or `choices[0].hash`; what: a sentence about
    it."""

    part: str
    what: str


class NoReceipt(ValueError):
    """The text that was read is not a receipt; `difference` names the part that is wrong."""

    def __init__(self, part: str, what: str) -> None:
        super().__init__(f"{part}: {what}")
        self.difference = Difference(part, what)


# -- hashes ----------------------------------------------------------------------------------------
def canonical(value: Any) -> bytes:
    """The one way to write a value: JSON in ASCII, names sorted, no spaces, floats by their repr.
    ValueError for a number that is none."""
    plain = msgspec.to_builtins(value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def token_hash(kind: Literal["prompt", "output"], tokens: Sequence[int]) -> str:
    """SHA-256 of a domain, the number of tokens (8 bytes), and each as 4 bytes; little-endian."""
    digest = _hash(kind, len(tokens).to_bytes(8, "little"))
    digest.update(_bytes(tokens))
    return digest.hexdigest()


def token_chain(tokens: Sequence[int]) -> tuple[int, str]:
    """(block, links): after every `block` tokens eight hex digits of the hash of all tokens up to
    there. Two answers that differ have equal links up to the block in which they part."""
    block = BLOCK
    while len(tokens) // block > MAX_LINKS:
        block *= 2
    return block, "".join(_links(tokens, block))


def _links(tokens: Sequence[int], block: int) -> Iterator[str]:
    digest = _hash("chain")
    for start in range(0, len(tokens) - block + 1, block):
        digest.update(_bytes(tokens[start : start + block]))
        yield digest.copy().hexdigest()[:CHECK]


def _bytes(tokens: Sequence[int]) -> bytes:
    values = array("i", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _hash(domain: str, data: bytes = b"") -> hashlib._Hash:
    """A hash of one use here cannot be passed off as one of another."""
    return hashlib.sha256(f"pageturner receipt {VERSION} {domain}\0".encode() + data)


def _split(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


# -- making ----------------------------------------------------------------------------------------
def params_of(params: SamplingParams, n: int, best_of: int) -> ReceiptParams:
    """The part of resolved parameters that a receipt holds."""
    given = {name: getattr(params, name) for name in ReceiptParams.__struct_fields__}
    given |= {"n": n, "best_of": best_of, "seed": str(params.seed)}
    return msgspec.convert(given, ReceiptParams)  # which makes floats of whole numbers


def prompt_of(tokens: Sequence[int], max_tokens: int) -> ReceiptPrompt:
    return ReceiptPrompt(
        tokens=len(tokens), hash=token_hash("prompt", tokens), max_tokens=max_tokens
    )


def choice_of(index: int, prompt: int, tokens: Sequence[int], finish: str) -> ReceiptChoice:
    block, chain = token_chain(tokens)
    return ReceiptChoice(
        index=index,
        prompt=prompt,
        finish_reason=finish,
        tokens=len(tokens),
        hash=token_hash("output", tokens),
        block=block,
        chain=chain,
    )


def sealed(receipt: Receipt, key: bytes = b"") -> Receipt:
    """The receipt with its checks and its digest, and with a signature if there is a key."""
    parts = _parts(receipt)
    checks = "".join(_check(part, parts[part]) for part in sorted(parts))
    whole = _whole(receipt)
    signature = None
    if key:
        value = _hmac(key, whole)
        signature = Signature(algorithm="hmac-sha256", key=key_name(key), value=value)
    return msgspec.structs.replace(
        receipt, checks=checks, digest=_digest(whole), signature=signature
    )


def key_name(key: bytes) -> str:
    """The name of a key in receipts."""
    return _hash("key", key).hexdigest()[:16]


def _whole(receipt: Receipt) -> bytes:
    plain = msgspec.to_builtins(receipt)
    return canonical({name: value for name, value in plain.items() if name not in SEALS})


def _digest(whole: bytes) -> str:
    return _hash("digest", whole).hexdigest()


def _hmac(key: bytes, whole: bytes) -> str:
    domain = f"pageturner receipt {VERSION} signature\0".encode()
    return hmac.new(key, domain + whole, hashlib.sha256).hexdigest()


def _check(part: str, value: Any) -> str:
    return _hash("part", part.encode() + b"\0" + canonical(value)).hexdigest()[:CHECK]


def _parts(receipt: Receipt) -> dict[str, Any]:
    """Each field by its path; a list of numbers or texts is one part."""
    plain = msgspec.to_builtins(receipt)
    return dict(_leaves({name: value for name, value in plain.items() if name not in SEALS}, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and path != "params.logit_bias":
        for name, one in value.items():
            yield from _leaves(one, f"{path}.{name}" if path else name)
    elif path in ("prompts", "choices"):
        yield path, len(value)
        for i, one in enumerate(value):
            yield from _leaves(one, f"{path}[{i}]")
    else:
        yield path, value


# -- reading ---------------------------------------------------------------------------------------
def read_receipt(text: str | bytes) -> Receipt:
    """The receipt in a text: itself, or in the field `receipt` of an answer. NoReceipt names what
    is wrong with its form; whether it was changed is the question of `changes`."""
    try:
        if isinstance(text, str):
            text = text.removeprefix("\ufeff")  # which some editors put in front
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoReceipt("receipt", f"is not JSON: {error}") from None
    if isinstance(value, dict) and "receipt" in value:
        value = value["receipt"]
    try:
        receipt = msgspec.convert(value, Receipt, str_keys=True)
        _whole(receipt)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise _named(str(error)) from None
    return receipt


def _named(message: str) -> NoReceipt:
    """The error of msgspec about a form, by the part that is wrong."""
    message, _, path = message.partition(" - at `$")
    field = re.search(r"(unknown|required) field `(.*)`", message)
    part = ".".join(filter(None, (path.strip(".`"), field[2] if field else "")))
    if field is not None:
        return NoReceipt(
            part, "is missing" if field[1] == "required" else "is no field of a receipt"
        )
    return NoReceipt(part or "receipt", f"is of another form: {message[:1].lower()}{message[1:]}")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def changes(receipt: Receipt, key: bytes = b"") -> list[Difference]:
    """The changes of a receipt since it was written, as far as it tells by itself. key: of the
    server that signed it; without one the signature is not looked at."""
    parts, whole = _parts(receipt), _whole(receipt)
    kept, complete = receipt.digest == _digest(whole), len(receipt.checks) == CHECK * len(parts)
    checks = zip(sorted(parts), _split(receipt.checks, CHECK), strict=False)
    wrong = [part for part, check in checks if check != _check(part, parts[part])]
    if kept and (wrong or not complete):
        return [
            Difference("checks", "are not those of the parts, which are unchanged by their digest")
        ]
    if not complete:
        what = f"are of {len(receipt.checks) / CHECK:g} parts, and there are {len(parts)}"
        return [Difference("checks", f"{what}: parts were added or taken away")]
    if wrong:
        return [Difference(part, "is not what was written: its check differs") for part in wrong]
    if not kept:
        return [
            Difference("digest", "is not that of the parts, which are unchanged by their checks")
        ]
    return _signature_changes(receipt.signature, whole, key) if key else []


def _signature_changes(signature: Signature | None, whole: bytes, key: bytes) -> list[Difference]:
    if signature is None:
        return [Difference("signature", "is missing, and a key was given to check it with")]
    right, named = _hmac(key, whole) == signature.value, key_name(key)
    if right and named == signature.key:
        return []
    if right:
        return [
            Difference("signature.key", f"is {signature.key}, and the signature is that of {named}")
        ]
    if named != signature.key:
        what = f"is {signature.key}, and the key that was given is {named}: the signature is not its own"
        return [Difference("signature.key", what)]
    return [
        Difference("signature.value", "does not fit: it or the receipt was changed without the key")
    ]


# -- making again ----------------------------------------------------------------------------------
def sampling_of(receipt: Receipt, prompt: ReceiptPrompt) -> SamplingParams:
    """The parameters with which the answers to one prompt are made again."""
    params = receipt.params
    given = {name: getattr(params, name) for name in _AS_THEY_ARE}
    return SamplingParams(
        **given,
        n=params.n,
        best_of=None if params.beam_width else params.best_of,
        seed=int(params.seed),
        max_tokens=prompt.max_tokens,
        # the end of sequence is among the stop ids already; a grammar wants it to be looked up
        ignore_eos=params.structured_outputs is None or params.ignore_eos,
    )


def differences(choice: ReceiptChoice, tokens: Sequence[int], finish: str) -> Iterator[Difference]:
    """The differences of an answer that was made again from that of the receipt."""
    path = f"choices[{choice.index}]"
    if token_hash("output", tokens) != choice.hash:
        yield Difference(f"{path}.hash", _where(choice, tokens))
    if len(tokens) != choice.tokens:
        what = f"is {choice.tokens}, and the answer made again has {len(tokens)} tokens"
        yield Difference(f"{path}.tokens", what)
    if finish != choice.finish_reason:
        yield Difference(
            f"{path}.finish_reason", f"is {choice.finish_reason!r}, made again {finish!r}"
        )


def _where(choice: ReceiptChoice, tokens: Sequence[int]) -> str:
    told = _split(choice.chain, CHECK)
    block = max(choice.block, 1)
    same = 0
    for mine, its in zip(_links(tokens, block), told, strict=False):
        if mine != its:
            first = same * block + 1
            return f"the first token that differs is one of {first} to {first + block - 1}"
        same += 1
    first, last = same * block + 1, max(len(tokens), choice.tokens)
    if first > last:
        return "differs, and the chain of its tokens does not"
    return f"the first token that differs is one of {first} to {last}"


def first_difference(given: Sequence[Any], made: Sequence[Any]) -> int | None:
    """The position, from 1, of the first element in which two sequences differ; None: they are
    equal."""
    for position, (one, other) in enumerate(zip(given, made, strict=False), 1):
        if one != other:
            return position
    return None if len(given) == len(made) else min(len(given), len(made)) + 1


def matching_prompts(receipt: Receipt, prompts: Sequence[Sequence[int]]) -> list[Difference]:
    """The differences of prompts from those of the receipt; none if they are the same."""
    if len(prompts) != len(receipt.prompts):
        return [Difference("prompts", f"are {len(receipt.prompts)}, and {len(prompts)} were given")]
    found = []
    for i, (prompt, tokens) in enumerate(zip(receipt.prompts, prompts, strict=True)):
        if len(tokens) != prompt.tokens:
            what = f"is {prompt.tokens}, and the prompt that was given has {len(tokens)}"
            found.append(Difference(f"prompts[{i}].tokens", what))
        if token_hash("prompt", tokens) != prompt.hash:
            found.append(
                Difference(f"prompts[{i}].hash", "is not that of the prompt that was given")
            )
    return found


def truncated(receipt: Receipt, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Whole prompts as far as the request kept them."""
    found = [list(tokens) for tokens in prompts]
    if receipt.params.truncate_prompt_tokens is None or len(found) != len(receipt.prompts):
        return found
    return [tokens[-kept.tokens :] for tokens, kept in zip(found, receipt.prompts, strict=True)]
