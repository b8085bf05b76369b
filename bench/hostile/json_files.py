"""JSON files made hostile: values, keys, numbers, nesting, encodings; and what configurations make of them.

Owns the nasty values and texts. Must not know what comes of loading them. Every change follows from the dice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hostile.binary import INTS, Dice, Mutate, put, words

RAW = "@raw@"  # in front of what is written into JSON as it is
PATTERNS = words("patterns")
TEMPLATES = words("templates")
TEXTS = (*words("texts"), *PATTERNS[:3], *TEMPLATES[:3])
NUMBERS_AS_TEXT = words("numbers")
DEEP = words("deep")


def nasty(dice: Dice) -> Any:
    """A value that stands in JSON where another one was."""
    return dice.choice(
        (
            lambda: dice.choice(INTS),
            lambda: dice.choice((*INTS, 2**63, 2**64, 10**30, -(10**18))),
            lambda: dice.choice((0.5, -0.5, 1e-320, 1e308, 1e30)),
            lambda: dice.choice(TEXTS),
            lambda: dice.choice(
                (None, True, False, [], {}, [0], [[]], {"a": 1}, [None] * 3, ["a"] * 5000)
            ),
            lambda: RAW + dice.choice(NUMBERS_AS_TEXT),
            lambda: RAW + dice.choice(DEEP),
        )
    )()


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value; of long lists some."""
    keys: Any = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = range(len(value))
    found = []
    for key in keys if len(keys) < 60 else [*keys[:20], *keys[-20:]]:
        found.append((value, key))
        found += places(value[key])
    return found


def written(value: Any) -> bytes:
    """JSON with what is RAW in it as it is."""
    text = json.dumps(value)
    while (at := text.find(f'"{RAW}')) >= 0:
        inner, end = json.JSONDecoder().raw_decode(text, at)
        text = text[:at] + inner.removeprefix(RAW) + text[end:]
    return text.encode()


def json_of(name: str, known: dict[str, tuple[Any, ...]] | None = None) -> Mutate:
    """Changes a value of a JSON file, takes one away, or says what `known` has for a key."""

    def change(folder: Path, dice: Dice) -> str:
        path = folder / name
        value = json.loads(path.read_bytes()) if path.is_file() else {}
        kind = dice.choice(
            ("value", "value", "value", "delete", "known", "known", "whole", "encoding")
        )
        container, key = dice.choice(places(value) or [(value, "a")])
        if kind == "known" and known:
            container, key = value, dice.choice(sorted(known))
            container[key] = dice.choice((*known[key], nasty(dice)))
        elif kind == "delete":
            container.pop(key)
            return f"{name} without {key}"
        elif kind == "whole":
            value = nasty(dice)
        elif kind == "encoding":
            text = written(value).decode()
            put(
                path,
                dice.choice(
                    (
                        text.encode("utf-16"),
                        b"\xef\xbb\xbf" + text.encode(),
                        text.encode() + b"\xff",
                        text.replace('"', '"\\ud800', 1).encode(),
                        text.encode() + b"]",
                    )
                ),
            )
            return f"{name} in another encoding"
        else:
            container[key] = nasty(dice)
        put(path, written(value))
        return f"{name} {key} = {repr(value if kind == 'whole' else container[key])[:80]}"

    return change


CONFIG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(words("config sizes"), INTS),
    "max_window_layers": (-(10**18), -1, 10**18),
    "use_sliding_window": (True,),
    "mlp_only_layers": (5, "a", [0.5]),
    "layer_types": ([], ["sliding_attention"] * 2, [{}] * 2),
    "partial_rotary_factor": (RAW + "1e999", -1, 1e300),
    "rms_norm_eps": (0, 1, RAW + "NaN"),
    "rope_theta": (1, 1.0000000000000002, 1e308),
    "rope_parameters": tuple(
        {
            "rope_type": kind,
            "rope_theta": base,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": 4,
            "original_max_position_embeddings": context,
            "beta_slow": low,
            "beta_fast": 32,
        }
        for kind in ("yarn", "llama3", "linear", "dynamic")
        for base in (1e4, 1.0000000000000002)
        for factor in (2, 1e-320, RAW + "1e999")
        for low in (1, 1e-320)
        for context in (0, 64, 2**31)
    ),
    "attn_logit_softcapping": (1e-320, RAW + "1e999"),
    "tie_word_embeddings": (True, False),
}
GENERATION: dict[str, tuple[Any, ...]] = dict.fromkeys(
    words("generation"),
    (*INTS, RAW + "9" * 400, RAW + "NaN", [10**18], [[0]], [2] * 9000),
)
