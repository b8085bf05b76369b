"""Tokenizers of model folders."""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path

import pytest

from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.formats.sentencepiece import Merger
from support import texts
from support.refusals import engine_fault
from support.smollm2 import GOLDENS


@pytest.fixture
def spm(tmp_path: Path) -> Path:
    shutil.copy(GOLDENS / "tiny_spm.model", tmp_path / "tokenizer.model")
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def test_a_sentencepiece_model_equals_the_library(spm: Path) -> None:
    tokenizer = load_tokenizer(spm)
    hard = texts.random_texts(3000)
    rows = [tokenizer.encode(text, add_special=False, parse_special=False) for text in hard]
    assert texts.digest(rows) == json.loads((GOLDENS / "tiny_spm.json").read_text())["random"]
    for text, ids in zip(hard, rows, strict=True):
        assert tokenizer.decode_whole(ids) == text.replace("▁", " ")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos, tokenizer.space_prefix) == (
        1,
        (2,),
        True,
        True,
    )


def test_what_a_folder_adds(spm: Path) -> None:
    added = {
        "900": {"content": "<|turn|>", "special": True},
        "901": {"content": "[x]", "special": False},
    }
    template = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(
        spm,
        "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "eos_token": {"content": "<|turn|>"},
            "chat_template": template,
        },
    )
    write(spm, "generation_config.json", {"eos_token_id": [2, 900]})
    tokenizer = load_tokenizer(spm)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.chat_template) == (
        902,
        (900, 2),
        "D",
    )
    assert tokenizer.encode("a<|turn|>", add_special=True, parse_special=True)[-1] == 900
    assert 900 not in tokenizer.encode("a<|turn|>", add_special=True, parse_special=False)
    assert 901 in tokenizer.encode("a[x]", add_special=False, parse_special=False)
    for said, default, others in (
        ({"default": "D", "tool_use": "T"}, "D", {"tool_use": "T"}),
        ("S", "S", {}),
        (5, None, {}),
        ([], None, {}),
    ):
        write(spm, "chat_template.json", {"chat_template": said})
        tokenizer = load_tokenizer(spm)
        assert (tokenizer.chat_template, tokenizer.named_templates) == (default, others)
    (spm / "chat_template.json").unlink()
    (spm / "chat_template.jinja").write_text("J")
    (spm / "additional_chat_templates").mkdir()
    (spm / "additional_chat_templates" / "rag.jinja").write_text("R")
    with_files = load_tokenizer(spm)
    assert with_files.chat_template == "J"
    assert with_files.named_templates == {"tool_use": "T", "rag": "R"}


def test_refusals(tmp_path: Path) -> None:
    for name, raw, code in (
        ("other.txt", b"", "tokenizer_missing"),
        ("tokenizer.model", b"\x0a\xff", "tokenizer_corrupt"),
        ("tokenizer.model", base64.b64encode(b"a") + b" 0\n", "tokenizer_unsupported"),
        ("tokenizer.json", b"{}", "tokenizer_corrupt"),
    ):
        (tmp_path / name).write_bytes(raw)
        with engine_fault(code=code):
            load_tokenizer(tmp_path)


def test_the_heap_merges_as_the_search_does() -> None:
    """Two independent ways to the same merges, ties and overlaps included."""
    chance = random.Random(5)
    for _ in range(500):
        ids: dict[str, int] = {c: i for i, c in enumerate("ab")}
        for _ in range(30):
            ids.setdefault(
                "".join(chance.choice("ab") for _ in range(chance.randrange(2, 5))), len(ids)
            )
        merger = Merger(ids, [float(chance.randrange(4)) for _ in ids], lambda symbol: [])
        word = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 40)))
        assert merger._merge_long(word) == merger._merge_short(list(word))
