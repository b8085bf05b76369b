"""What is told of a text before it is tokenised is never more than the tokens that it has."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from pageturner.formats.bpe import BYTES, PRE_TOKENIZERS, ByteLevel
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.formats.sentencepiece import NORMAL
from pageturner.formats.tokenizer import Tokenizer
from support import hf_folder, smollm2, texts, vocabs
from support.smollm2 import GOLDENS

SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
LEVEL = hf_folder.tokenizer_json()["decoder"]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def folder(tmp_path: Path, **changes: Any) -> Tokenizer:
    """A tokenizer.json with a token a byte, with some parts of it changed."""
    spec = hf_folder.tokenizer_json() | changes
    hf_folder.write_json(tmp_path / "tokenizer.json", spec)
    return load_tokenizer(tmp_path)


def holds(tokenizer: Tokenizer, count: int = 400) -> None:
    for text in [
        *texts.random_texts(count),
        "a" * 3000,
        " " * 500,
        "\x00" * 300,
        "=" * 700,
        "e\u0301" * 90,
    ]:
        for parse in (False, True):
            true = len(tokenizer.encode(text, add_special=False, parse_special=parse))
            assert tokenizer.least_tokens(text) <= true, text


def test_byte_level_in_gguf() -> None:
    tokenizer = load_tokenizer(GOLDENS / "tiny_llama.gguf")
    holds(tokenizer)
    assert tokenizer.least_tokens("a" * 1_000_000) > 20_000
    assert tokenizer.least_tokens("") == 0


def test_bytes_without_a_token_do_not_count() -> None:
    tokens = [letter for letter, byte in BYTES.items() if byte != 1]
    codec = ByteLevel(tokens, [NORMAL] * len(tokens), [], PRE_TOKENIZERS["gpt-2"])
    assert codec.encode("\x01" * 50 + "ab", True) == codec.encode("ab", True)
    assert codec.least_tokens("\x01" * 50 + "ab") == 2


def test_sentencepiece(tmp_path: Path) -> None:
    shutil.copy(GOLDENS / "tiny_spm.model", tmp_path / "tokenizer.model")
    holds(load_tokenizer(tmp_path))
    added = {"900": {"content": "<|im_end|>", "special": True, "rstrip": True}}
    hf_folder.write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    swallowing = load_tokenizer(tmp_path)
    holds(swallowing)
    text = "<|im_end|>" + " " * 10_000
    assert (
        swallowing.least_tokens(text)
        <= len(swallowing.encode(text, add_special=False, parse_special=True))
        < 9
    )


def test_tokenizer_json(tmp_path: Path) -> None:
    holds(folder(tmp_path))
    assert folder(tmp_path).least_tokens("a" * 1000) == 112  # as long as <extra60>
    holds(folder(tmp_path, normalizer={"type": "NFC"}))
    assert folder(tmp_path, normalizer={"type": "NFC"}).least_tokens("a" * 1000) == 28


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE, {"type": "StripAccents"}]}},
        {"normalizer": {**REPLACE, "content": ""}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, LEVEL]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "model": {
                "type": "BPE",
                "vocab": {"<unk>": 0, "a": 1},
                "merges": [],
                "unk_token": "<unk>",
            }
        },
    ],
)
def test_where_something_may_be_left_out_nothing_is_told(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokenizer = folder(tmp_path, **changes)
    holds(tokenizer, 100)
    assert tokenizer.least_tokens("a" * 100_000) == 0


def test_unicode_composes_no_more_characters_than_is_said() -> None:
    alone = (
        unicodedata.normalize("NFD", chr(code))
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000
    )
    assert max(len(text) for text in alone if len(unicodedata.normalize("NFC", text)) == 1) <= 4


@pytest.mark.model
def test_smollm2_drops_bytes_and_is_bounded_all_the_same() -> None:
    tokenizer = load_tokenizer(smollm2.model_path())
    holds(tokenizer, 2000)
    assert tokenizer.least_tokens("word " * 800_000) > 8192


@pytest.mark.model
@pytest.mark.parametrize("name", vocabs.NAMES)
def test_every_kind_of_vocabulary(name: str) -> None:
    tokenizer = load_tokenizer(vocabs.vocab_path(name))
    holds(tokenizer, 1000)
    assert json.dumps(tokenizer.least_tokens("a b" * 1_000_000))
