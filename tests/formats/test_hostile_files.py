"""Files that somebody made in order to hurt: each is refused with a code, in bounded time and memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.errors import LONGEST, EngineFault
from pageturner.formats import hub
from pageturner.formats.generation_config import read_generation
from pageturner.formats.hf_config import parse_json, read_json
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.formats.safetensors import open_safetensors
from support import gguf_writer as w
from support.hf_folder import GOLDENS, make_folder, tokenizer_json, write_json
from support.refusals import client_error, engine_fault
from support.safetensors_writer import write_safetensors

Spoil = Callable[[Path], object]


def code_of(load: Callable[[], object], *says: object) -> str:
    """The code of the fault, whose message is one line that can be printed and says all this."""
    with engine_fault() as caught:
        load()
    assert caught.value.message.isprintable()
    for part in says:
        assert str(part) in caught.value.message, caught.value.message
    return caught.value.code


# -- messages ------------------------------------------------------------------------------------------------
def test_a_message_is_one_line_of_bounded_length() -> None:
    assert EngineFault("c", "a\nb\x1b[2J\ud800é").message == "a\\nb\\x1b[2J\\ud800é"
    long = EngineFault("c", "begin" + "\n" * 9_000_000 + "end").message
    assert long.startswith("begin")
    assert long.endswith("end")
    assert len(long) < 2.5 * LONGEST


# -- JSON ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "raw",
    [
        b'"\\ud800"',
        b'{"\\uDC00a": 1}',
        b'"\xed\xa0\x80"',
        b"9" * 400,
        b"[-" + b"9" * 5000 + b"]",
        '{"a": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff",
        b"",
        b"{}x",
    ],
)
def test_json_that_cannot_be_quoted_or_counted(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    assert code_of(lambda: read_json(tmp_path / "config.json"), tmp_path) == "config_corrupt"


def test_json_that_is_odd_and_sound() -> None:
    assert parse_json(b'{"model_max_length": 1000000000000000019884624838656}') == {
        "model_max_length": 1e30
    }
    assert type(parse_json(b"18446744073709551615")) is int
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00\\\\ud800"}') == {"a": "😀\\ud800"}
    assert parse_json(b"[-9223372036854775808, 18446744073709551615]") == [-(2**63), 2**64 - 1]


def test_no_file_is_read_that_is_larger_than_such_files_are(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ):
        (tmp_path / name).write_bytes(b"")
        os.truncate(tmp_path / name, 1 << 40)  # all of it a hole
    assert (
        code_of(lambda: read_json(tmp_path / "config.json"), "larger than 16 MiB")
        == "config_corrupt"
    )
    assert code_of(lambda: load_tokenizer(tmp_path), "larger than 16 MiB") == "tokenizer_corrupt"
    assert (
        code_of(lambda: open_safetensors(tmp_path), "larger than 32 MiB") == "safetensors_corrupt"
    )
    (tmp_path / "tokenizer.json").write_bytes(b"")
    os.truncate(tmp_path / "tokenizer.json", 1 << 40)
    assert code_of(lambda: load_tokenizer(tmp_path), "larger than 256 MiB") == "tokenizer_corrupt"


def test_sampling_defaults_with_numbers_that_do_not_end(tmp_path: Path) -> None:
    for text in ("9" * 400, "1e999", "-Infinity", "NaN"):
        (tmp_path / "generation_config.json").write_text(f'{{"temperature": {text}}}')
        code_of(lambda: read_generation(tmp_path), "generation_config.json")


# -- safetensors ---------------------------------------------------------------------------------------------
def header(text: bytes, length: int | None = None) -> Spoil:
    raw = struct.pack("<Q", len(text) if length is None else length) + text + bytes(64)
    return lambda folder: (folder / "model.safetensors").write_bytes(raw)


def row(**changes: Any) -> bytes:
    return json.dumps({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes).encode()


def index(*files: object) -> Spoil:
    names = {f"t{i}": file for i, file in enumerate(files)}
    return lambda folder: write_json(folder / "model.safetensors.index.json", {"weight_map": names})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (header(b'{"a": ' + row() + b', "a": ' + row() + b"}"), "twice"),
        (header(b'{"a": ' + row(shape=[9_999_999_999] * 100_000) + b"}"), "bad shape"),
        (header(b'{"\\ud800": ' + row() + b"}"), "broken header"),
        (header(b"{}", 90_000_000), "truncated"),
        (header(b"[" * 50_000), "broken header"),
        (index(".."), "in the same folder"),
        (index("../../etc/passwd"), "in the same folder"),
        (index(""), "in the same folder"),
        (index("a\0b"), "in the same folder"),
        (index("x" * 300), "in the same folder"),
        (index("é" * 200), "in the same folder"),
        (index(*(f"f{i}" for i in range(3000))), "3,000 files"),
        (index(5), "in the same folder"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 99_999), "no"),
    ],
)
def test_hostile_tables_of_safetensors(spoil: Spoil, says: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    assert code_of(lambda: open_safetensors(tmp_path), tmp_path, says) == "safetensors_corrupt"


def test_a_header_longer_than_any_model_has(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 90_000_000))
    os.truncate(path, 100_000_000)
    assert code_of(lambda: open_safetensors(tmp_path), path) == "safetensors_corrupt"


def test_a_shard_may_be_a_link(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "blob", {"t0": ("F32", (4,), bytes(16))})
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blob")
    index("a.safetensors")(tmp_path)
    assert list(open_safetensors(tmp_path).tensors) == ["t0"]


# -- tokenizers of folders -----------------------------------------------------------------------------------
def tokenizer(**changes: object) -> Spoil:
    return lambda folder: write_json(folder / "tokenizer.json", tokenizer_json() | changes)


def model(**changes: object) -> Spoil:
    return tokenizer(model=tokenizer_json()["model"] | changes)


def file(name: str, value: object) -> Spoil:
    return lambda folder: write_json(folder / name, value)


def spm(*fields: bytes) -> Spoil:
    def build(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        raw = (GOLDENS / "tiny_spm.model").read_bytes()
        (folder / "tokenizer.model").write_bytes(raw + b"".join(fields))

    return build


def added(number: object, **token: object) -> Spoil:
    return file(
        "tokenizer_config.json", {"added_tokens_decoder": {number: {"content": "x"} | token}}
    )


WORDS = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "u"}
VOCAB = tokenizer_json()["model"]["vocab"]
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
CHARSMAP = {
    "type": "Precompiled",
    "precompiled_charsmap": "BAAAAAAAAABhYQA=",
}  # its trie leads out of it
AROUND = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": AROUND,
    "pair": AROUND,
    "special_tokens": {"x": {"id": "x", "ids": [10**9], "tokens": ["x"]}},
}
TWICE = (
    json.dumps(tokenizer_json())[:-1]
    + ', "normalizer": '
    + json.dumps({"type": "Precompiled", "precompiled_charsmap": "/////w=="})
    + ', "normalizer": null}'
)
TOKENIZERS: dict[str, tuple[Spoil, str]] = {
    "pattern without end": (tokenizer(pre_tokenizer=SPLIT), "tokenizer_unsupported"),
    "a table that leads nowhere": (tokenizer(normalizer=CHARSMAP), "tokenizer_corrupt"),
    "a token around a text": (tokenizer(post_processor=TEMPLATE), "tokenizer_corrupt"),
    "a hole of 2^31": (model(vocab=VOCAB | {"zz": 2**31}), "tokenizer_corrupt"),
    "a hole of 5 million": (model(vocab=VOCAB | {"zz": 5_000_000}), "tokenizer_corrupt"),
    "no vocabulary": (
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
        "tokenizer_corrupt",
    ),
    "merges of nothing": (model(merges=["nope nope"]), "tokenizer_corrupt"),
    "merges shorter than their prefix": (
        model(continuing_subword_prefix="##", merges=[["a", "b"]]),
        "tokenizer_corrupt",
    ),
    "words only": (tokenizer(model=WORDS), "tokenizer_corrupt"),
    "deep": (
        lambda f: (f / "tokenizer.json").write_text('{"model":' * 99_999),
        "tokenizer_corrupt",
    ),
    "added far away": (added(10**9), "tokenizer_corrupt"),
    "added behind a gap": (added(3_000_000), "tokenizer_corrupt"),
    "added before": (added(-1), "tokenizer_corrupt"),
    "added at infinity": (
        lambda f: (f / "added_tokens.json").write_text('{"a": 1e999}'),
        "tokenizer_corrupt",
    ),
    "added as a list": (
        file("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        "tokenizer_corrupt",
    ),
    "half a character": (file("tokenizer_config.json", {"eos_token": "\ud800"}), "config_corrupt"),
    "half a name": (added(5, content="\ud800"), "config_corrupt"),
    "template no UTF-8": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"),
        "tokenizer_corrupt",
    ),
    "rules of the wrong type": (spm(b"\x1a\x02\x08\x05"), "tokenizer_corrupt"),
    "a piece without a text": (spm(b"\x0a\x02\x08\x05"), "tokenizer_corrupt"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hostile_tokenizers(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, code = TOKENIZERS[name]
    folder = make_folder(tmp_path / "model")
    spoil(folder)
    assert code_of(lambda: load_tokenizer(folder), folder) == code
    assert capfd.readouterr().err == ""


def test_what_a_file_says_twice_is_checked_as_it_is_used(tmp_path: Path) -> None:
    """The library would have built both normalizers, and the first one takes 4 GB."""
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text(TWICE)
    assert load_tokenizer(folder).vocab_size == 320


def test_a_text_that_the_tokenizer_cannot_take_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    tokenizer(model=WORDS | {"vocab": {"a": 0}})(folder)
    with client_error(status=400, code="tokenizer_failed"):
        load_tokenizer(folder).encode("b", add_special=False, parse_special=True)


# -- tokenizers of GGUF files --------------------------------------------------------------------------------
KEY = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_type": [float("nan")] * 320}, "gguf_metadata"),
        ({"token_type": [float("inf")] * 320}, "gguf_metadata"),
        ({"token_type": ["1"] * 320}, "gguf_metadata"),
        ({"model": "llama", "scores": ["a"] * 320}, "gguf_metadata"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer_corrupt"),
        ({"tokens": [], "token_type": []}, "gguf_metadata"),
        ({"merges": ["nope nope"]}, "tokenizer_corrupt"),
        ({"bos_token_id": 1 << 31}, "tokenizer_corrupt"),
    ],
)
def test_hostile_vocabularies_of_gguf(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    metadata, _ = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(
        w.gguf_bytes(metadata | {KEY + key: value for key, value in changes.items()}, {})
    )
    assert code_of(lambda: load_tokenizer(path), path) == code


def test_an_empty_vocabulary(tmp_path: Path) -> None:
    kinds = {"tokens": 8, "token_type": 5}
    empty = [w.string(KEY + key) + struct.pack("<IIQ", 9, kind, 0) for key, kind in kinds.items()]
    pairs = [w.pair(KEY + "model", "gpt2"), w.pair(KEY + "pre", "gpt-2"), *empty]
    (tmp_path / "m.gguf").write_bytes(w.padded(w.header(3, 0, 4) + b"".join(pairs)))
    assert code_of(lambda: load_tokenizer(tmp_path / "m.gguf"), "is empty") == "tokenizer_corrupt"


def test_marks_that_a_small_vocabulary_lacks(tmp_path: Path) -> None:
    metadata, _ = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    bare = {key: value for key, value in metadata.items() if not key.startswith(KEY)}
    one = {
        KEY + "model": "llama",
        KEY + "tokens": ["a"],
        KEY + "token_type": [1],
        KEY + "scores": [0.0],
    }
    (tmp_path / "m.gguf").write_bytes(w.gguf_bytes(bare | one, {}))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (1, None, ())


# -- references ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "reference", ["x" * 5000 + ".gguf", "a\0b.gguf", "~nobody-of-this-name/m.gguf"]
)
def test_references_that_no_file_system_knows(reference: str) -> None:
    assert code_of(lambda: hub.resolve(reference)) == "model_not_found"
