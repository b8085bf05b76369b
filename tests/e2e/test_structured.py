"""Structured output from end to end: whatever the model would rather say, the answer has its form."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner import LLM, SamplingParams, StructuredOutputsParams
from support.refusals import client_error

GOLDENS = Path(__file__).parent.parent / "goldens"
PROMPTS = ["the old house", "her very", "no", "it was the end of all that"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(GOLDENS / "tiny_llama.gguf"), backend="reference", kv_cache_dtype="float32")


def params(
    seed: int = 0, temperature: float = 1.0, max_tokens: int = 120, **asked: Any
) -> SamplingParams:
    grammar = StructuredOutputsParams(**asked)
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=grammar
    )


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 12
        and 0 <= person["age"] <= 150
        and len(person["tags"]) <= 3
        and set(person["tags"]) <= {"red", "blue"}
    )


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": PERSON, "disable_any_whitespace": True}, is_person),
    ({"regex": r"[a-f]{2,6}-\d{3}"}, lambda text: re.fullmatch("[a-f]{2,6}-[0-9]{3}", text)),
    ({"choice": ["yes", "no", "naïve 東京"]}, lambda text: text in ("yes", "no", "naïve 東京")),
    (
        {"grammar": 'root ::= "<" [a-c]{1,4} ">" root?'},
        lambda text: re.fullmatch("(<[abc]{1,4}>)+", text),
    ),
]


def test_every_answer_has_the_form_that_was_asked_for(llm: LLM) -> None:
    """All forms in one batch, greedy and sampled; each text decodes to what was said."""
    asked = [(form, holds) for form, holds in FORMS for _ in PROMPTS]
    each = [params(seed, float(seed % 3 > 0), **form) for seed, (form, _) in enumerate(asked)]
    outputs = llm.generate(PROMPTS * len(FORMS), each)
    finished = 0
    for output, (form, holds) in zip(outputs, asked, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason == "stop":
            assert holds(answer.text), (form, answer.text)
            assert answer.token_ids[-1] in llm.tokenizer.eos_ids
            finished += 1
    assert finished > 12
    assert len({output.outputs[0].text for output in outputs}) > 8


def test_an_answer_that_can_only_end_ends(llm: LLM) -> None:
    (output,) = llm.generate("the old house", params(choice=["no"]))
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason) == ("no", "stop")
    assert llm.tokenizer.decode(answer.token_ids[:-1]) == "no"


def test_an_answer_may_be_cut_by_max_tokens(llm: LLM) -> None:
    (output,) = llm.generate("the old house", params(max_tokens=3, regex=r"[a-z 東京]{20,30}"))
    (answer,) = output.outputs
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 3


def test_an_answer_that_can_never_end_is_refused(llm: LLM) -> None:
    """What is certain of it needs more tokens than it may have; with one more it may be had."""
    text = "verily 東京 verily"
    with client_error(code="grammar_too_long") as refused:
        llm.generate("the old house", params(max_tokens=3, choice=[text]))
    least = int(refused.value.message.split(" has ")[1].split()[0])
    with client_error():
        llm.generate("the old house", params(max_tokens=least - 1, choice=[text]))
    assert (
        llm.generate("the old house", params(max_tokens=least, choice=[text]))[0]
        .outputs[0]
        .token_ids
    )
    whole = llm.generate("the old house", params(max_tokens=99, choice=[text]))[0].outputs[0]
    assert whole.text == text
    assert len(whole.token_ids) - 1 >= least


def test_stop_strings_and_logprobs_beside_a_grammar(llm: LLM) -> None:
    asked = params(json=PERSON, disable_any_whitespace=True)
    both = SamplingParams(
        temperature=1.0,
        max_tokens=99,
        seed=0,
        stop=('","',),
        structured_outputs=asked.structured_outputs,
    )
    (output,) = llm.generate("the old house", both)
    assert output.outputs[0].finish_reason in ("stop", "length")
    assert output.outputs[0].text.startswith('{"name":"')
    told = SamplingParams(logprobs=2, max_tokens=4, structured_outputs=asked.structured_outputs)
    (output,) = llm.generate("the old house", told)
    unlikely = [logprob < top[0][1] for logprob, top in output.outputs[0].logprobs]
    assert any(unlikely), "logprobs are of the raw logits, whatever the grammar forbids"


def test_whoever_sees_no_logits_gets_the_same_tokens(llm: LLM) -> None:
    """Without logprobs the head follows the grammar itself, and computes only what is allowed."""
    native = LLM(str(GOLDENS / "tiny_llama.gguf"), kv_cache_dtype="float32")
    each = [params(seed, float(seed % 2), 40, **form) for seed, (form, _) in enumerate(FORMS)]
    told = [replace(one, logprobs=0) for one in each]
    for engine in (llm, native):
        outputs = [out.outputs[0].token_ids for out in engine.generate(PROMPTS * 2, each + told)]
        assert outputs[:4] == outputs[4:]


def test_nothing_left_to_choose_is_said(llm: LLM) -> None:
    grammar = StructuredOutputsParams(choice=["no"])
    asked = SamplingParams(structured_outputs=grammar, allowed_token_ids=(5, 6))
    with client_error(code="nothing_allowed"):
        llm.generate("the old house", asked)


def test_a_grammar_that_only_the_engine_can_refuse(llm: LLM) -> None:
    with client_error(code="invalid_grammar"):
        llm.generate("the old house", SamplingParams(structured_outputs="start: foo"))
    assert not llm.built.engine.has_work


LONG = PERSON["properties"] | {"name": {"type": "string", "minLength": 80, "maxLength": 90}}


def text_of(
    client: httpx.Client, body: dict[str, Any], server: int, kill_at: int | None
) -> tuple[str, set[int]]:
    """The streamed answer, and the engine processes before and after it; the first is killed at a token."""
    engines, text = engines_of(server), ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        for n, line in enumerate(
            line for line in response.iter_lines() if line.startswith("data: {")
        ):
            if n == kill_at:
                os.kill(min(engines), signal.SIGKILL)
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
    assert choice["finish_reason"] == "stop"
    return text, engines | engines_of(server)


def engines_of(server: int) -> set[int]:
    """Its children that are no text workers."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return {
        int(pid)
        for pid in children
        if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


@pytest.mark.slow
def test_a_killed_engine_goes_on_in_the_middle_of_a_grammar() -> None:
    """The next one knows nothing but the tokens so far, and ends the text as it would have ended."""
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "serve",
        str(GOLDENS / "tiny_llama.gguf"),
        "--port",
        "0",
    ]
    with subprocess.Popen(
        [*command, "--backend", "reference"], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "listening on" in line)
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        url = line.split("listening on ")[1].split(";")[0]
        body = {
            "prompt": "the old house",
            "max_tokens": 300,
            "seed": 11,
            "temperature": 1.0,
            "stream": True,
            "structured_outputs": {
                "json": PERSON | {"properties": LONG},
                "disable_any_whitespace": True,
            },
        }
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            whole, engines = text_of(client, body, server.pid, kill_at=None)
            again, others = text_of(client, body, server.pid, kill_at=20)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        drain.wait(60)
    assert len(engines | others) == 2, "one was killed, one came after it"
    assert again == whole
    assert len(json.loads(whole)["name"]) >= 80
