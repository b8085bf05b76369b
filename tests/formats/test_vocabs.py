"""Every kind of tokenizer against llama.cpp: its own vectors, whole texts, random texts, and the way back."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from pageturner.formats.load_tokenizer import Tokenizer, load_tokenizer
from pageturner.text.detokenizer import Detokenizer
from support import texts, vocabs
from support.gguf_writer import gguf_bytes, taken_apart
from support.smollm2 import GOLDENS

GOLDEN = json.loads((GOLDENS / "vocab_tokens.json").read_text())
pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=vocabs.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(vocabs.vocab_path(name))


@pytest.fixture(scope="module")
def singles(tokenizer: Tokenizer) -> set[bytes]:
    return {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize("name", vocabs.SHA256)  # whole models come without vectors
def test_vectors_of_llama_cpp(name: str) -> None:
    tokenizer = load_tokenizer(vocabs.vocab_path(name))
    cases = vocabs.vectors(name)
    assert len(cases) > 40
    for text, ids in cases:
        assert plain(tokenizer, text) == ids, text


BYTE_LEVEL = [n for n in vocabs.SHA256 if n not in ("llama-spm", "phi-3", "gemma-4")]


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_vectors_of_files_that_name_no_pre_tokenizer(name: str, tmp_path: Path) -> None:
    """It is told by the tokens of a text, as by llama.cpp's converter."""
    metadata, _ = taken_apart(vocabs.vocab_path(name))
    del metadata["tokenizer.ggml.pre"]
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gguf_bytes(metadata, {}))
    tokenizer = load_tokenizer(path)
    assert [plain(tokenizer, text) for text, _ in vocabs.vectors(name)] == [
        ids for _, ids in vocabs.vectors(name)
    ]


@pytest.mark.parametrize(("key", "parse"), [("random", False), ("random, parsed", True)])
def test_ten_thousand_random_texts(name: str, tokenizer: Tokenizer, key: str, parse: bool) -> None:
    rows = (
        tokenizer.encode(text, add_special=False, parse_special=parse)
        for text in texts.random_texts(10_000)
    )
    assert texts.digest(rows) == GOLDEN[name][key]


def test_whole_texts(name: str, tokenizer: Tokenizer) -> None:
    folder = vocabs.text_folder()
    if folder is None:
        pytest.skip("no texts; set PAGETURNER_DATA")
    for file, sha256 in GOLDEN["files"].items():
        path = folder / file
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            pytest.skip(f"{path} is not the text that the golden was recorded on")
        rows = (plain(tokenizer, text) for text in texts.pieces(path))
        assert texts.digest(rows) == GOLDEN[name][file], file


def complete(singles: set[bytes], text: str) -> bool:
    """Whether the vocabulary has a token for each byte of the text; some lack control characters."""
    return all(bytes([byte]) in singles for byte in set(text.encode()))


def test_text_comes_back(tokenizer: Tokenizer, singles: set[bytes]) -> None:
    """Except U+2581, which SentencePiece takes for a space."""
    for text in texts.random_texts(100, seed=2):
        if "▁" not in text and complete(singles, text):
            assert tokenizer.decode_whole(plain(tokenizer, text), skip_special=False) == text


@pytest.mark.parametrize("kind", ["texts", "any tokens"])
def test_a_stream_equals_decoding_at_once(
    tokenizer: Tokenizer, singles: set[bytes], kind: str
) -> None:
    """Also for tokens in an order no text has. No character comes out in pieces."""
    chance = random.Random(3)
    for text in texts.random_texts(100, seed=3):
        if kind == "texts":
            ids = plain(tokenizer, text)
        else:
            ids = [chance.randrange(tokenizer.vocab_size) for _ in range(30)]
        stream = Detokenizer(tokenizer)
        shown = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(shown) == tokenizer.decode(ids)
        if kind == "texts" and "\ufffd" not in text and complete(singles, text):
            assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("unit", ["a", " ", "▁", "\n", "é", "ab ", "x\n", "🦙", "\u0301"])
def test_long_runs_end(name: str, tokenizer: Tokenizer, unit: str) -> None:
    """200,000 characters in time linear in them; quadratic time would be hours, and meet the timeout."""
    text = unit * (200_000 // len(unit))
    ids = plain(tokenizer, text)
    assert tokenizer.decode_whole(ids).replace("▁", " ") == text.replace("▁", " ")


def test_marks_of_the_files() -> None:
    """(bos, ends, bos added, space in front), as the files or llama.cpp's defaults have them."""
    expected = {
        "llama-spm": (1, (2,), True, True),
        "phi-3": (1, (32000, 32007), True, True),
        "llama-bpe": (128000, (128001, 128009), True, False),
        "qwen2": (151643, (151643, 151645), False, False),
        "gemma-4": (2, (1, 106), True, False),
        "gemma3-270m-q4_k_m": (2, (1, 106), True, False),
    }
    for name, marks in expected.items():
        t = load_tokenizer(vocabs.vocab_path(name))
        assert (t.bos_id, t.eos_ids, t.add_bos, t.space_prefix) == marks, name
