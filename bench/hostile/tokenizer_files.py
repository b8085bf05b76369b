"""Tokenizers and chat templates made hostile: patterns, normalizers, vocabularies, added tokens, sources.

Must not know what comes of loading them. Every change follows from the dice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hostile.binary import Dice, put
from hostile.json_files import PATTERNS, RAW, TEMPLATES, TEXTS, written


def _normalizers(dice: Dice) -> Any:
    pattern = (
        {"Regex": dice.choice(PATTERNS)}
        if dice.random() < 0.5
        else {"String": dice.choice(("a", "", "ab"))}
    )
    double = {"type": "Replace", "pattern": pattern, "content": dice.choice(("aa", "", "a" * 999))}
    charsmap = {
        "type": "Precompiled",
        "precompiled_charsmap": dice.choice(("", "AAAA", "/////w==", "BAAAAAAAAABhYQA=")),
    }
    one = dice.choice(
        (
            double,
            charsmap,
            {"type": "NFKD"},
            {"type": "Prepend", "prepend": "x" * 9999},
            {"type": "Lowercase"},
        )
    )
    return {"type": "Sequence", "normalizers": [one] * dice.choice((1, 3, 40, 2000))}


def tokenizer_rules(folder: Path, dice: Dice) -> str:
    """Patterns, normalizers, models and templates of a tokenizer.json."""
    path = folder / "tokenizer.json"
    value = json.loads(path.read_bytes())
    split = {
        "type": "Split",
        "pattern": {"Regex": dice.choice(PATTERNS)},
        "invert": dice.random() < 0.3,
        "behavior": dice.choice(("Isolated", "Removed", "MergedWithNext", "Nope")),
    }
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * dice.choice((1, 9999)) + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    vocab = value["model"]["vocab"]
    changes: list[dict[str, Any]] = [
        {"pre_tokenizer": split},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split] * dice.choice((2, 500))}},
        {"normalizer": _normalizers(dice)},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": template,
                "pair": template,
                "special_tokens": {
                    "<s>": {
                        "id": "<s>",
                        "ids": [dice.choice((1, 10**9, 2**32 - 1))] * dice.choice((0, 1, 99)),
                        "tokens": ["<s>"],
                    }
                },
            }
        },
        {
            "model": {
                "type": "Unigram",
                "unk_id": dice.choice((0, None, 10**9)),
                "byte_fallback": dice.random() < 0.5,
                "vocab": [[k, dice.choice((-1.0, 0, 1e300, -1e300))] for k in vocab][
                    : dice.choice((0, 1, 300))
                ],
            }
        },
        {
            "model": {
                "type": dice.choice(("WordLevel", "WordPiece")),
                "unk_token": dice.choice(("<unk>", "nope", "")),
                "vocab": vocab,
                "max_input_chars_per_word": dice.choice((0, 100, 2**62)),
                "continuing_subword_prefix": "",
            }
        },
        {
            "model": value["model"]
            | {"merges": dice.choice((["a b", "nope nope"], [["a", "b"]], ["ab"], [""], [["a"]]))}
        },
        {
            "model": value["model"]
            | {"vocab": vocab | {"zz": dice.choice((2**31, 2**32 - 1, 10**9, 5_000_000, 0))}}
        },
        {
            "model": value["model"]
            | dice.choice(
                (
                    {"vocab": {}},
                    {"unk_token": "nope"},
                    {"byte_fallback": True},
                    {"dropout": 2.0},
                    {"continuing_subword_prefix": "##"},
                    {"end_of_word_suffix": "x" * 99},
                )
            )
        },
        {
            "added_tokens": value["added_tokens"]
            + [
                value["added_tokens"][0]
                | {
                    "id": dice.choice((10**9, 2**32 - 1, 5)),
                    "content": dice.choice(("", "zz", " ", "a")),
                }
            ]
        },
        {
            "truncation": {
                "max_length": 0,
                "strategy": "LongestFirst",
                "stride": 9,
                "direction": "Right",
            }
        },
        {
            "decoder": dice.choice(
                (
                    None,
                    {"type": "ByteFallback"},
                    {"type": "Sequence", "decoders": []},
                    {"type": "Metaspace"},
                )
            )
        },
    ]
    change = dice.choice(changes)
    put(path, written(value | change))
    return str(change)[:150]


def added_tokens(folder: Path, dice: Dice) -> str:
    """What tokenizer_config.json and added_tokens.json add."""
    number = dice.choice(("0", "320", "4194303", "4194304", "1000000000", "-1", "x", "9" * 30))
    token = {"content": dice.choice((*TEXTS, 5)), "special": dice.random() < 0.5}
    if dice.random() < 0.5:
        put(folder / "tokenizer_config.json", written({"added_tokens_decoder": {number: token}}))
    else:
        put(
            folder / "added_tokens.json",
            written({"zz": dice.choice((1, 10**9, RAW + "1e999", [], None))}),
        )
    return f"{number} {token}"[:100]


def template(folder: Path, dice: Dice) -> str:
    """A chat template, in one of the places where it may stand."""
    source = dice.choice(TEMPLATES) + (dice.choice(TEMPLATES) if dice.random() < 0.3 else "")
    place = dice.choice(("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    raw = (
        source.encode("utf-8", "surrogatepass")
        if place.endswith("jinja")
        else written({"chat_template": source})
    )
    put(folder / place, raw)
    return f"{place} {source[:60]!r}"


def tokenizer_gone(folder: Path, dice: Dice) -> str:
    """Another kind of tokenizer in the place of this one."""
    (folder / "tokenizer.json").unlink()
    ranks = b"".join(
        b"%s %d\n" % (word, rank) for word, rank in ((b"YQ==", 0), (b"Yg==", dice.choice((1, 5))))
    )
    name = dice.choice(("tokenizer.model", "qwen.tiktoken"))
    put(
        folder / name,
        dice.choice((ranks, b"", b"\x0a", ranks * 50, b"!!!! 0\n", b"YQ== " + b"9" * 5000)),
    )
    return name
