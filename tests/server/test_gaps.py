"""Filling gaps (FIM): `suffix` of completions, /infill, Ollama's `suffix`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.base.body import decode
from pageturner.server.api.base.call import Call
from pageturner.server.api.ollama.ollama import OLLAMA_GENERATE
from pageturner.server.api.openai import completions
from pageturner.server.api.openai.infill import INFILL
from pageturner.text.fim import fim_prompt, fim_tokens
from support.refusals import client_error
from support.vocabs import vocab_path

from .bytes_tokenizer import FIM, BytesTokenizer, answer
from .conftest import Server, shared
from .test_openai import SERVED

FILLS = replace(SERVED, tokenizer=BytesTokenizer(fills_gaps=True))
PRE, SUF, MID = FIM["prefix"], FIM["suffix"], FIM["middle"]
GAP = [PRE, *b"ab", SUF, *b"yz", MID]


server = shared(FAKE_FIM="1")


def completion(served: Any = FILLS, **fields: Any) -> Call:
    return completions.read(decode(json.dumps(fields).encode()), served)


def infill(served: Any = FILLS, **fields: Any) -> Call:
    return INFILL.read(INFILL.decode(json.dumps(fields).encode(), NO_LIMITS), served)


def test_the_gap_of_a_completion() -> None:
    call = completion(prompt="ab", suffix="yz")
    assert list(call.prompts[0]) == GAP
    assert set(call.params[0].stop_ids) == {PRE, SUF, MID}
    assert call.params[0].max_tokens == 16
    assert list(completion(prompt=list(b"ab"), suffix="yz").prompts[0]) == GAP
    assert [list(prompt) for prompt in completion(prompt=["ab", ""], suffix="yz").prompts] == [
        GAP,
        [PRE, SUF, *b"yz", MID],
    ]
    marks = completion(prompt="<|bos|>", suffix="<|end|>").prompts[0]
    assert list(marks) == [PRE, *b"<|bos|>", SUF, *b"<|end|>", MID]  # a text holds no marks
    assert list(completion(prompt="ab", suffix="").prompts[0]) == list(b"ab")
    assert completion(prompt="ab", suffix="yz", ignore_eos=True).params[0].stop_ids == ()


def test_infill_has_other_files_and_what_was_typed() -> None:
    assert list(infill(input_prefix="a", prompt="b", input_suffix="yz").prompts[0]) == GAP
    extra = [{"filename": "f.py", "text": "t"}, {"text": "u"}]
    call = infill(input_prefix="ab", input_suffix="yz", input_extra=extra)
    assert list(call.prompts[0]) == [*b"\n\nt\n\nu", *GAP]
    params = infill(input_prefix="ab", n_predict=3, repeat_penalty=1.5, top_k=4, seed=-1).params[0]
    assert (params.max_tokens, params.repetition_penalty, params.top_k) == (3, 1.5, 4)
    assert infill(input_prefix="ab", n_predict=-1).params[0].max_tokens == SERVED.capacity + 1 - 5
    assert infill(input_prefix="ab", n_predict=0).only_echoes
    editors = {
        "cache_prompt": True,
        "samplers": ["top_k", "infill"],
        "t_max_predict_ms": 500,
        "n_indent": 4,
    }
    assert infill(input_prefix="ab", input_suffix="yz", **editors).prompts == (tuple(GAP),)


def test_answers_have_the_shape_of_llama_cpp(server: Server) -> None:
    fields = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 20}
    told = server.http.post("/infill", json=fields).json()
    assert told["content"] == answer(GAP, 5)  # it ends with the sixth token
    assert (told["stop"], told["stop_type"], told["tokens_predicted"]) == (True, "eos", 6)
    assert (told["tokens_evaluated"], told["model"]) == (len(GAP), "fake")
    assert set(told["timings"]) >= {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second"}
    streamed = server.http.post("/infill", json={**fields, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [
        json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data")
    ]
    assert "".join(one["content"] for one in events) == told["content"]
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    assert events[-1] | {"timings": 0, "content": 0} == told | {"timings": 0, "content": 0}
    word = server.http.post("/infill", json={**fields, "stop": [answer(GAP, 5)[0]]}).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", answer(GAP, 5)[0])
    assert server.http.post("/infill", json={**fields, "n_predict": 0}).json()["content"] == ""
    long = {**fields, "input_extra": [{"text": "x" * 5000}]}  # by a text worker
    assert server.http.post("/infill", json=long).status_code == 400
    padded = {**fields, "padding": "x" * 5000}
    assert server.http.post("/infill", json=padded).json()["content"] == told["content"]


def test_the_same_gap_of_completions_and_ollama(server: Server) -> None:
    fields = {"prompt": "ab", "suffix": "yz"}
    choice = server.http.post("/v1/completions", json=fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (answer(GAP, 5), "stop")
    told = server.http.post(
        "/api/generate", json={**fields, "stream": False, "system": "be"}
    ).json()
    assert (told["response"], told["prompt_eval_count"]) == (answer(GAP, 5), len(GAP))
    assert "insert" in server.http.post("/api/show", json={"model": "fake"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("served", "fields", "code", "param"),
    [
        (SERVED, {"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        (FILLS, {"prompt": "a", "suffix": "b", "echo": True}, "unsupported_parameter", "echo"),
        (
            FILLS,
            {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3},
            "unsupported_parameter",
            "truncate_prompt_tokens",
        ),
        (FILLS, {"prompt": "a", "suffix": "b" * 100}, "context_length_exceeded", "prompt"),
        (FILLS, {"prompt": "a", "suffix": 5}, "invalid_type", "suffix"),
    ],
)
def test_refusals(served: Any, fields: dict[str, Any], code: str, param: str) -> None:
    with client_error(code=code, param=param):
        completion(served, **fields)


def test_refusals_say_the_names_of_each_shape() -> None:
    for call, param in (
        (lambda: infill(SERVED, input_prefix="a", input_suffix="b"), "input_suffix"),
        (lambda: infill(input_extra=[5]), "input_extra"),
        (lambda: infill(input_prefix="a", n_probs=2), "n_probs"),
        (lambda: infill(input_prefix="a", n_predict=-5), "n_predict"),
        (lambda: infill(input_prefix="a", n_predict=500), "n_predict"),
        (lambda: infill(input_prefix="a" * 200), "input_prefix"),
    ):
        with client_error(param=param):
            call()
    raw = json.dumps({"prompt": "a", "suffix": "b"}).encode()
    with client_error("FIM"):
        OLLAMA_GENERATE.read(OLLAMA_GENERATE.decode(raw, NO_LIMITS), SERVED)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("starcoder", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
        ("refact", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
        ("deepseek-coder", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
        (
            "qwen2.5-coder-0.5b-instruct-q4_k_m",
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ),
    ],
)
def test_marks_of_real_vocabularies(name: str, texts: tuple[str, str, str]) -> None:
    tokenizer = load_tokenizer(vocab_path(name))
    tokens = fim_tokens(tokenizer)
    assert tokens is not None
    prompt = fim_prompt(tokens, tokenizer, "def f(", "return 1\n")
    told = tokenizer.decode(prompt, skip_special=False)
    bos = tokenizer.bos_token if tokenizer.add_bos else ""
    assert told == f"{bos}{texts[0]}def f({texts[1]}return 1\n{texts[2]}"
    assert set(tokens.ends) >= {tokens.prefix, tokens.suffix, tokens.middle}


@pytest.mark.model
@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "qwen2", "phi-3"])
def test_vocabularies_without_such_marks(name: str) -> None:
    assert fim_tokens(load_tokenizer(vocab_path(name))) is None


@pytest.mark.model
def test_no_space_is_put_in_front_of_a_suffix() -> None:
    tokenizer = load_tokenizer(vocab_path("llama-spm"))
    assert tokenizer.decode(tokenizer.encode_inside("return")) == "return"
    assert (
        tokenizer.decode(tokenizer.encode("return", add_special=False, parse_special=False))
        == " return"
    )
    assert tokenizer.decode(tokenizer.encode_inside("  x ☺")) == "  x ☺"
