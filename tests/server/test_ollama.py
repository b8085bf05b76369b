"""Ollama's API: its lines, its options, its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.text.chat_template import ChatTemplate
from support.refusals import client_error

from .bytes_tokenizer import TEMPLATE, BytesTokenizer, answer
from .conftest import Server
from .test_openai import SERVED

HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|bos|>user\nhi<|end|>\n<|bos|>assistant\n"


def call(dialect: Any, **fields: Any) -> Any:
    return dialect.read(dialect.decode(json.dumps(fields).encode(), NO_LIMITS), SERVED)


def refusal(dialect: Any, **fields: Any) -> ClientError:
    with client_error() as caught:
        call(dialect, **fields)
    return caught.value


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_streamed_as_lines_unless_it_says_otherwise(server: Server) -> None:
    fields = {"model": "fake:latest", "messages": HI, "options": {"num_predict": 20, "seed": 1}}
    told = lines(server.http.post("/api/chat", json=fields))
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    assert "".join(one["message"]["content"] for one in told) == answer(PROMPT, 20)
    assert {one["model"] for one in told} == {"fake"}
    last = told[-1]
    assert (last["done_reason"], last["eval_count"], last["prompt_eval_count"]) == (
        "length",
        20,
        21,
    )
    assert last["total_duration"] >= last["eval_duration"] > 0
    whole = server.http.post("/api/chat", json={**fields, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": answer(PROMPT, 20)}
    assert (whole["done"], whole["eval_count"]) == (True, 20)


def test_generate_goes_through_the_template_unless_it_is_raw(server: Server) -> None:
    def ask(**fields: Any) -> str:
        body = {"options": {"num_predict": 9}, "stream": False, **fields}
        return str(server.http.post("/api/generate", json=body).json()["response"])

    assert ask(prompt="hi") == answer(PROMPT, 9)
    assert ask(prompt="hi", raw=True) == answer("hi", 9)
    assert ask(prompt="hi", system="be") == answer("<|bos|>system\nbe<|end|>\n" + PROMPT, 9)
    streamed = lines(
        server.http.post("/api/generate", json={"prompt": "hi", "options": {"num_predict": 9}})
    )
    assert "".join(one["response"] for one in streamed) == answer(PROMPT, 9)


def test_the_end_of_an_answer(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "<|short|>"}]}
    last = lines(server.http.post("/api/chat", json=body))[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", 6)


def test_options_are_our_fields() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"],
        "num_predict": 5,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "num_ctx": 4096,
        "mirostat": 0,
        "num_gpu": 1,
    }
    params = call(OLLAMA_CHAT, messages=HI, options=options).params[0]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.seed, params.stop, params.max_tokens) == (3, ("x",), 5)
    assert params.repetition_penalty == 1.2
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)
    for endless in (-1, -2):
        made = call(OLLAMA_GENERATE, prompt="hi", raw=True, options={"num_predict": endless})
        assert made.params[0].max_tokens == 79


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert call(OLLAMA_CHAT, messages=HI, format="").params[0].structured_outputs is None
    assert call(OLLAMA_CHAT, messages=HI, format="json").params[0].structured_outputs
    assert '"a"' in call(OLLAMA_GENERATE, prompt="hi", format=schema).params[0].structured_outputs


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"options": {"num_predict": -3}}, "invalid_value", "num_predict"),
        ({"options": {"temperature": "hot"}}, "invalid_type", "options.temperature"),
        ({"options": {"repeat_penalty": -1}}, "invalid_value", "options.repeat_penalty"),
        ({"options": {"mirostat": 2}}, "unsupported_parameter", "mirostat"),
        ({"options": {"frobnicate": 2}}, "unsupported_parameter", "frobnicate"),
        ({"options": 5}, "invalid_json", "options"),
        ({"format": "yaml"}, "invalid_value", "yaml"),
        ({"format": {"type": "objekt"}}, "invalid_schema", "format"),
        ({"tools": [{}]}, "unsupported_parameter", "tools"),
        ({"think": True}, "unsupported_parameter", "think"),
        ({"think": "much"}, "invalid_value", "think is true, false, low"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"model": "other"}, "model_not_found", "other"),
        ({"messages": [{"role": "user", "images": ["x"]}]}, "unsupported_parameter", "images"),
        (
            {"options": {"num_predict": 500}},
            "context_length_exceeded",
            "options.num_predict is 500",
        ),
    ],
)
def test_refusals_say_what_the_client_knows(fields: dict[str, Any], code: str, says: str) -> None:
    error = refusal(OLLAMA_CHAT, **{"messages": HI, **fields})
    assert (error.code, says in error.message) == (code, True), error.message


def test_a_model_without_a_template_generates_all_the_same() -> None:
    def read(served: Any) -> Any:
        raw = json.dumps({"prompt": "hi", "system": "be"}).encode()
        return OLLAMA_GENERATE.read(OLLAMA_GENERATE.decode(raw, NO_LIMITS), served)

    assert bytes(read(replace(SERVED, template=None)).prompts[0]) == b"be\n\nhi"
    assert len(read(replace(SERVED, template=ChatTemplate(TEMPLATE))).prompts[0]) > 20
    assert BytesTokenizer().encode("be", add_special=True, parse_special=True) == list(b"be")


def test_errors_have_their_shape(start: Callable[..., Server]) -> None:
    server = start("--api-key", "sesame", "--max-body-size", "9K")
    key = {"authorization": "Bearer sesame"}
    for response, status in (
        (server.http.post("/api/chat", json={"messages": HI}), 401),
        (server.http.post("/api/chat", json={"messages": HI, "model": "other"}, headers=key), 404),
        (server.http.post("/api/chat", content=b"{", headers=key), 400),
        (server.http.post("/api/generate", json={"prompt": "x" * 9999}, headers=key), 413),
        (server.http.get("/api/nothing", headers=key), 404),
    ):
        assert response.status_code == status
        assert isinstance(response.json()["error"], str)
    failing = server.http.post("/api/generate", json={"prompt": "<|fail|>"}, headers=key)
    # on a busy machine it may fail before its first token was sent: then it is no stream
    assert "told to fail" in json.loads(failing.text.splitlines()[-1])["error"]


def test_what_asks_for_nothing_has_the_model_loaded(server: Server) -> None:
    loaded = server.http.post("/api/generate", json={"model": "fake"}).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    loaded = server.http.post(
        "/api/chat", json={"model": "fake", "messages": [], "keep_alive": 0}
    ).json()
    assert (loaded["message"]["content"], loaded["done_reason"]) == ("", "unload")
    assert server.http.post("/api/chat", json={"model": "other"}).status_code == 404


def test_models(server: Server) -> None:
    (model,) = server.http.get("/api/tags").json()["models"]
    assert model["model"] == model["name"] == "fake"
    assert server.http.get("/api/ps").json()["models"][0]["name"] == "fake"
    shown = server.http.post("/api/show", json={"model": "fake:latest"}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 2048
    assert (shown["template"], shown["capabilities"]) == (TEMPLATE, ["completion"])
    for path in ("/api/show", "/api/pull"):
        assert server.http.post(path, json={"name": "other"}).status_code == 404
    assert server.http.post("/api/pull", json={"model": "fake:latest"}).json() == {
        "status": "success"
    }
    assert server.http.get("/api/version").json()["version"]


def test_a_long_one_is_read_by_a_worker(server: Server) -> None:
    body = {"prompt": "x" * 5000, "raw": True}
    refused = server.http.post("/api/generate", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("This model's maximum context length")
    body = {"messages": HI, "options": {"num_predict": 2}, "padding": "x" * 5000, "stream": False}
    assert server.http.post("/api/chat", json=body).json()["message"]["content"] == answer(
        PROMPT, 2
    )
