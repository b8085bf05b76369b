"""The offline API takes what a model's files say where no parameters are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner import LLM, SamplingParams
from support.gguf_writer import gguf_bytes, taken_apart
from support.hf_folder import make_folder

GOLDENS = Path(__file__).parent.parent / "goldens"
PROMPT = "the old house"


def load(path: Path, **settings: str) -> LLM:
    return LLM(str(path), backend="reference", kv_cache_dtype="float32", **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = {"do_sample": False, "repetition_penalty": 1.5, "max_new_tokens": 7}
    return make_folder(tmp_path_factory.mktemp("hf") / "model", **said)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


def test_the_default_params(llm: LLM) -> None:
    expected = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=7)
    assert llm.get_default_sampling_params() == expected


def test_every_way_to_ask_uses_them(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    whole = llm.generate(PROMPT)[0].outputs
    assert whole == llm.generate(PROMPT, params)[0].outputs == llm.generate([PROMPT] * 2)[1].outputs
    assert whole != llm.generate(PROMPT, replace(params, repetition_penalty=1.0))[0].outputs
    assert "".join(llm.stream(PROMPT)) == whole[0].text
    messages = [{"role": "user", "content": "hi"}]
    assert llm.chat(messages).outputs == llm.chat(messages, params).outputs


def test_given_params_win_whole(llm: LLM) -> None:
    """As in vLLM: the caller's parameters are not mixed with the model's."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    other = load(Path(llm.config.model), generation_config="none")
    assert other.get_default_sampling_params() == SamplingParams()
    assert llm.generate(PROMPT, params)[0].outputs == other.generate(PROMPT, params)[0].outputs
    assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 12


def test_a_file_elsewhere_speaks_instead_and_ends_answers(
    folder: Path, llm: LLM, tmp_path: Path
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    second = llm.generate(PROMPT, greedy)[0].outputs[0].token_ids[1]
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"top_k": 3, "eos_token_id": second}))
    other = load(folder, generation_config=str(file))
    assert other.get_default_sampling_params() == SamplingParams(top_k=3)
    answer = other.generate(PROMPT, greedy)[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (2, "stop", None)
    assert 2 in other.tokenizer.eos_ids, "the model's own end stays"


def test_gguf_files_have_them_too(tmp_path: Path) -> None:
    metadata, tensors = taken_apart(GOLDENS / "tiny_llama.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_bytes({**metadata, "general.sampling.temp": 0.0, "general.sampling.top_k": 9}, tensors)
    )
    llm = load(path)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=9)
    assert llm.generate(PROMPT)[0].outputs == llm.generate(PROMPT)[0].outputs
    assert load(path, generation_config="none").get_default_sampling_params() == SamplingParams()
