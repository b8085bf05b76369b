"""The tokenizer against recorded token ids, and against text that wants to break it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pageturner.formats.load_tokenizer import Tokenizer, load_tokenizer
from support import gguf_writer as w
from support import smollm2
from support.refusals import engine_fault
from support.smollm2 import GOLDENS
from support.texts import digest, pieces

TINY = GOLDENS / "tiny_llama.gguf"
KEY = "tokenizer.ggml."


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return load_tokenizer(smollm2.model_path())


def changed(tmp_path: Path, change: Callable[[dict[str, w.Value]], object]) -> Path:
    """The tiny file with other metadata."""
    metadata, _ = w.taken_apart(TINY)
    change(metadata)
    path = tmp_path / "changed.gguf"
    path.write_bytes(w.gguf_bytes(metadata, {}))
    return path


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


# -- exactness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", json.loads((GOLDENS / "tiny_tokens.json").read_text()), ids=lambda c: c["text"][:9]
)
def test_tiny_goldens(tiny: Tokenizer, case: dict[str, object]) -> None:
    text = str(case["text"])
    assert plain(tiny, text) == case["plain"]
    assert tiny.encode(text, add_special=False, parse_special=True) == case["parsed"]
    assert tiny.decode(plain(tiny, text)) == text


@pytest.mark.model
def test_smollm2_tricky_texts(smol: Tokenizer) -> None:
    cases = json.loads((GOLDENS / "smollm2_texts.json").read_text())
    assert len(cases) > 20
    for case in cases:
        assert plain(smol, case["text"]) == case["plain"], case["text"]
        assert smol.encode(case["text"], add_special=False, parse_special=True) == case["parsed"], (
            case["text"]
        )


@pytest.mark.model
@pytest.mark.parametrize("name", json.loads((GOLDENS / "smollm2_tokens.json").read_text()))
def test_smollm2_whole_texts(smol: Tokenizer, name: str) -> None:
    golden = json.loads((GOLDENS / "smollm2_tokens.json").read_text())[name]
    path = smollm2.text_folder() / name
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != golden["file_sha256"]:
        pytest.skip(f"{path} is not the text that the golden was recorded on")
    assert digest([plain(smol, text) for text in pieces(path)]) == golden["pieces"]["sha256"]
    if "whole" in golden:
        ids = plain(smol, raw.decode())
        assert digest([ids]) == golden["whole"]["sha256"]
        assert smol.decode(ids) == raw.decode()


# -- special tokens ------------------------------------------------------------------------------------------


def test_special_tokens_are_found_only_when_asked_for(tiny: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = tiny.encode(text, add_special=False, parse_special=True)
    assert (parsed[0], parsed[-1]) == (tiny.bos_id, tiny.eos_ids[0])
    assert not tiny.special_ids & set(plain(tiny, text))
    assert tiny.decode(parsed) == "user\nhi"
    assert tiny.decode(parsed, skip_special=False) == tiny.decode(plain(tiny, text)) == text


def test_what_the_file_says(tiny: Tokenizer) -> None:
    assert (tiny.vocab_size, tiny.bos_id, tiny.eos_ids, tiny.special_ids) == (
        320,
        1,
        (2,),
        {0, 1, 2},
    )
    assert (tiny.bos_token, tiny.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tiny.chat_template is not None
    assert "add_generation_prompt" in tiny.chat_template
    assert not tiny.add_bos
    assert tiny.encode("hi", add_special=True, parse_special=True) == plain(tiny, "hi")


def test_bos_and_eos_are_added_where_the_file_asks(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        changed(
            tmp_path, lambda m: m.update({KEY + "add_bos_token": True, KEY + "add_eos_token": True})
        )
    )
    ids = plain(tokenizer, "hi")
    assert tokenizer.encode("hi", add_special=True, parse_special=True) == [1, *ids, 2]
    assert tokenizer.encode("hi", add_special=False, parse_special=True) == ids


def test_all_ends_count_once(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda m: m.update({KEY + "eot_token_id": 0, KEY + "eom_token_id": 2}))
    assert load_tokenizer(path).eos_ids == (2, 0)


def test_user_defined_tokens_are_always_found(tmp_path: Path) -> None:
    def define(metadata: dict[str, w.Value]) -> None:
        metadata[KEY + "tokens"][300] = "<tool>"  # type: ignore[index, call-overload]
        metadata[KEY + "token_type"][300] = 4  # type: ignore[index, call-overload]
        metadata[KEY + "merges"] = metadata[KEY + "merges"][:1]  # type: ignore[index]

    tokenizer = load_tokenizer(changed(tmp_path, define))
    ids = plain(tokenizer, "a<tool>b")
    assert ids[1] == 300
    assert tokenizer.decode(ids) == "a<tool>b"


# -- bytes ---------------------------------------------------------------------------------------------------


def test_token_bytes_join_to_the_text(tiny: Tokenizer) -> None:
    text = "zażółć 第一章 👩‍👩‍👧\x00\x07 end"
    ids = plain(tiny, text)
    assert b"".join(map(tiny.token_bytes, ids)) == text.encode()
    assert any(tiny.token_bytes(i) == b"\xc5" for i in ids)  # half a character
    assert tiny.token_bytes(2) == b"<|im_end|>"
    assert tiny.decode(ids[:2] + plain(tiny, "ż")[:1]) == "za\ufffd"


@pytest.mark.parametrize("token", [320, 1 << 40])
def test_ids_beyond_the_vocabulary_have_no_text(tiny: Tokenizer, token: int) -> None:
    """The output of a model is often padded beyond it."""
    assert tiny.token_bytes(token) == b""
    assert tiny.decode([5, token]) == tiny.decode([5])


def test_a_negative_id_is_a_mistake(tiny: Tokenizer) -> None:
    with pytest.raises(IndexError):
        tiny.token_bytes(-1)


def test_all_bytes_have_a_place(tiny: Tokenizer) -> None:
    singles = {tiny.token_bytes(i) for i in range(tiny.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


@pytest.mark.model
def test_smollm2_bytes_without_a_token_keep_their_neighbours_apart(smol: Tokenizer) -> None:
    """Recorded from llama-server; SmolLM2 has no token for the bytes 4, 19 and 29."""
    assert plain(smol, "-…\x13…") == [29, 2829, 2829]
    assert plain(smol, "|> '\x04\x13-") == [108, 46, 637, 29]
    assert plain(smol, "-\x1d'sa") == [29, 23, *plain(smol, "sa")]
    assert plain(smol, "\x04") == []


# -- hostile text --------------------------------------------------------------------------------------------


def test_lone_surrogates_count_as_replacement_characters(tiny: Tokenizer) -> None:
    assert plain(tiny, "a\ud800b\udc00") == plain(tiny, "a\ufffdb\ufffd")
    assert plain(tiny, "\ud83d\ude00") == plain(tiny, "😀")


@pytest.mark.parametrize(
    "unit", ["a", " ", "1", "\n", "ab", "é", "\x00", "<|im_start|>", "<", "'", "\u0301"]
)
def test_long_runs_end(tiny: Tokenizer, unit: str) -> None:
    """A 'word' of 60,000 characters must not take quadratic time: many minutes, and the timeout."""
    text = unit * (60_000 // len(unit))
    for parse in (False, True):
        ids = tiny.encode(text, add_special=False, parse_special=parse)
        assert tiny.decode(ids, skip_special=False) == text


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("model", "bert", "tokenizer_unsupported"),
        ("pre", "kimi-k2", "tokenizer_unsupported"),
        ("merges", ["no-space"], "tokenizer_corrupt"),
        ("merges", ["a b c"], "tokenizer_corrupt"),
        ("merges", ["zz qq"], "tokenizer_corrupt"),
        ("token_type", [1, 1], "tokenizer_corrupt"),
        ("eos_token_id", 320, "tokenizer_corrupt"),
        ("bos_token_id", "x", "gguf_metadata"),
        ("tokens", 5, "gguf_metadata"),
        ("tokens", [5], "gguf_metadata"),
    ],
)
def test_unknown_and_broken_tokenizers_are_refused(
    tmp_path: Path, key: str, value: w.Value, code: str
) -> None:
    with engine_fault(code=code) as caught:
        load_tokenizer(changed(tmp_path, lambda metadata: metadata.update({KEY + key: value})))
    if code == "tokenizer_unsupported":
        assert repr(value) in caught.value.message


@pytest.mark.parametrize("key", ["model", "tokens", "merges", "token_type"])
def test_missing_parts_are_named(tmp_path: Path, key: str) -> None:
    with engine_fault(key):
        load_tokenizer(changed(tmp_path, lambda metadata: metadata.pop(KEY + key)))


def test_a_vocabulary_without_a_pre_tokenizer_that_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is split as by llama.cpp, which is said."""
    tokenizer = load_tokenizer(changed(tmp_path, lambda metadata: metadata.pop(KEY + "pre")))
    assert "names no pre-tokenizer" in capsys.readouterr().err
    text = "12345 it's"
    assert tokenizer.decode(plain(tokenizer, text)) == text


@pytest.mark.parametrize("harmony", [True, False])
def test_the_end_of_a_message_is_no_end_where_messages_follow(
    tmp_path: Path, harmony: bool
) -> None:
    """gpt-oss thinks in one message and answers in the next; to Phi the same mark is the end of its turn."""

    def define(metadata: dict[str, w.Value]) -> None:
        marks = ["<|end|>", "<|return|>", "<|call|>"] if harmony else ["<|end|>"]
        for token, mark in enumerate(marks, 300):
            metadata[KEY + "tokens"][token] = mark  # type: ignore[index, call-overload]
            metadata[KEY + "token_type"][token] = 3  # type: ignore[index, call-overload]
        metadata[KEY + "merges"] = metadata[KEY + "merges"][:1]  # type: ignore[index]

    assert load_tokenizer(changed(tmp_path, define)).eos_ids == (
        (2, 301, 302) if harmony else (2, 300)
    )
