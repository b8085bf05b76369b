"""Receipts to look at, and bits of them to change."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from pageturner.params import SamplingParams
from pageturner.text import receipt as form
from pageturner.text.receipt import Receipt, ReceiptInput

KEY = b"k" * 32
PARAMS = SamplingParams(
    temperature=0.7,
    seed=2**62 + 1,
    stop=("END", "\u00e9"),
    stop_ids=(2, 7),
    logit_bias={5: -1.5, 300: 2.0},
    bad_words_token_ids=((4,), (5, 6)),
    structured_outputs="start: /a/",
)


def receipt_of(tokens: list[int], key: bytes = KEY, params: SamplingParams = PARAMS) -> Receipt:
    """A receipt of one answer to the prompt 1, 2, 3."""
    return form.sealed(
        Receipt(
            version=form.VERSION,
            id="cmpl-1",
            object="text_completion",
            created=1_700_000_000,
            model="tiny",
            model_hash="sha256:00",
            fingerprint="native-avx2-0-auto-act_auto4-kv_float16",
            adapter="",
            input=ReceiptInput(
                add_special_tokens=None,
                add_generation_prompt=True,
                skip_special_tokens=True,
                echo=False,
            ),
            params=form.params_of(params, 1, 1),
            prompts=(form.prompt_of([1, 2, 3], 64),),
            choices=(form.choice_of(0, 0, tokens, "length"),),
        ),
        key,
    )


def plain(receipt: Receipt) -> dict[str, Any]:
    """As JSON has it."""
    return dict(json.loads(msgspec.json.encode(receipt)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, list[str | int]]]:
    """(part, keys on the way to it) of each value in a receipt. All of a list is one part."""
    for keys in _ways(value):
        part = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in keys).lstrip(
            "."
        )
        outer = part.partition("[")[0]
        if outer not in ("prompts", "choices"):
            part = outer
        if part.startswith("params.logit_bias"):
            part = "params.logit_bias"
        yield part, keys


def _ways(value: Any) -> Iterator[list[str | int]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if inner is None:
        yield []
    else:
        for key, one in inner:
            yield from ([key, *rest] for rest in _ways(one))


def flipped(value: dict[str, Any], keys: list[str | int], rng: random.Random) -> dict[str, Any]:
    """The receipt with one bit of one value changed; null becomes 0, an empty text a space."""
    value = json.loads(json.dumps(value))
    home: Any = value
    for key in keys[:-1]:
        home = home[key]
    home[keys[-1]] = _flipped(home[keys[-1]], rng)
    return value


def _flipped(one: Any, rng: random.Random) -> Any:
    if one is None:
        return 0
    if isinstance(one, bool):
        return not one
    if isinstance(one, int):
        return one ^ (1 << rng.randrange(31))
    if isinstance(one, float):
        (bits,) = struct.unpack("<Q", struct.pack("<d", one))
        (other,) = struct.unpack("<d", struct.pack("<Q", bits ^ (1 << rng.randrange(52))))
        return other
    at = rng.randrange(len(one)) if one else 0
    return one[:at] + (chr(ord(one[at]) ^ (1 << rng.randrange(7))) if one else " ") + one[at + 1 :]
