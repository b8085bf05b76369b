"""What a model's files say about sampling: generation_config.json, keys of GGUF, and the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageturner.formats import hub
from pageturner.formats.generation_config import GenerationDefaults, folder_eos_ids, read_generation
from pageturner.formats.gguf import open_gguf
from support.gguf_writer import gguf_bytes
from support.refusals import engine_fault


def say(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_every_key_by_its_name_here(tmp_path: Path) -> None:
    said = {
        "temperature": 1,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    unread = {
        "do_sample": True,
        "pad_token_id": 0,
        "max_length": 4096,
        "transformers_version": "5",
        "typical_p": None,
    }
    say(tmp_path, **said, **unread, max_new_tokens=99, eos_token_id=[2, 3])
    found = read_generation(tmp_path)
    assert found.sampling == {**said, "max_tokens": 99}
    assert found.eos_ids == (2, 3)
    assert found.source == str(tmp_path / "generation_config.json")
    assert "temperature 1, top_k 20" in str(found)
    assert read_generation(say(tmp_path, top_p=None)).sampling == {}


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == read_generation(None) == GenerationDefaults()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": True}, {}),
        ({"do_sample": None}, {}),
    ],
)
def test_do_sample_false_is_greedy(
    tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_generation(say(tmp_path, **said)).sampling == expected


def test_the_setting(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, top_k in ((model, 5), (other, 7)):
        folder.mkdir()
        say(folder, top_k=top_k, eos_token_id=top_k)
    assert read_generation(model, "auto").sampling == {"top_k": 5}
    assert read_generation(model, "none") == read_generation(model, "vllm") == GenerationDefaults()
    for path in (other, other / "generation_config.json"):
        found = read_generation(model, str(path))
        assert (found.sampling, found.eos_ids) == ({"top_k": 7}, (7,))
    for nothing in (tmp_path, tmp_path / "absent"):
        with engine_fault(
            r"--generation-config .*there is no .*auto, none or", code="generation_config"
        ):
            read_generation(model, str(nothing))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": "hot"}, "temperature should be a number, not 'hot'"),
        ({"temperature": -0.5}, "temperature must be 0 to 1000, not -0.5"),
        ({"top_k": 1.5}, "top_k should be a whole number, not 1.5"),
        ({"top_k": -2}, "top_k must be -1 to"),
        ({"top_p": True}, "top_p should be a number, not True"),
        ({"top_p": 1.5}, "top_p must be 0 to 1, not 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be 0.001 to 1000"),
        ({"max_new_tokens": 0}, "max_tokens must be 1 to 2147483647"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id should be token ids"),
        ({"eos_token_id": -1}, "eos_token_id should be token ids"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with engine_fault(code="generation_config") as caught:
        read_generation(say(tmp_path, **said))
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with engine_fault(r"generation_config\.json"):
        read_generation(tmp_path)


def test_what_ends_an_answer(tmp_path: Path) -> None:
    assert folder_eos_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert folder_eos_ids(tmp_path) == (7,)
    assert folder_eos_ids(say(tmp_path, temperature="not looked at")) == (7,)
    assert folder_eos_ids(say(tmp_path, eos_token_id=[2, 3])) == (2, 3)


def test_an_alias_is_sampled_as_its_card_advises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the file of the alias, in the cache, and only where it says nothing itself."""
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    path = hub.cache_folder() / hub.ALIASES["smollm2"].filename
    path.parent.mkdir()
    path.write_bytes(gguf_bytes({"general.name": "x"}, {}))
    assert read_generation(open_gguf(path)).sampling == {"temperature": 0.2, "top_p": 0.9}
    assert read_generation(open_gguf(path), "none").sampling == {}
    other = path.rename(path.with_name("other.gguf"))
    assert read_generation(open_gguf(other)).sampling == {}
    path.write_bytes(gguf_bytes({"general.sampling.temp": 0.5}, {}))
    assert read_generation(open_gguf(path)).sampling == {"temperature": 0.5}


def test_the_keys_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys = {
        "temp": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "penalty_repeat": 1.1,
        "mirostat": 2,
    }
    path.write_bytes(
        gguf_bytes({f"general.sampling.{key}": value for key, value in keys.items()}, {})
    )
    found = read_generation(open_gguf(path))
    assert found.sampling == {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert found.source == str(path)
    path.write_bytes(gguf_bytes({"general.sampling.temp": "hot"}, {}))
    with engine_fault("temperature should be a number"):
        read_generation(open_gguf(path))
    path.write_bytes(gguf_bytes({"general.name": "x"}, {}))
    assert read_generation(open_gguf(path)) == GenerationDefaults()
