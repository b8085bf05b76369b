"""Ollama's rows, on the engine of the product without a model: of each token its number, and 1."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.base.call import Call
from pageturner.server.api.ollama.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from support.refusals import client_error

from .conftest import Server, shared
from .test_openai import SERVED

server = shared(FAKE_ENGINE="own")


def read(dialect: Any = OLLAMA_EMBED, **fields: Any) -> Call:
    call: Call = dialect.read(dialect.decode(json.dumps(fields).encode(), NO_LIMITS), SERVED)
    return call


def test_rows_of_both_ways(server: Server) -> None:
    unit = 2.0**-24
    told = server.http.post(
        "/api/embed", json={"model": "fake:latest", "input": ["ab", "c"]}
    ).json()
    assert (told["model"], told["prompt_eval_count"], told["load_duration"]) == ("fake", 3, 0)
    assert told["total_duration"] > 0
    assert [math.hypot(*row) for row in told["embeddings"]] == pytest.approx([1, 1])
    assert told["embeddings"][0][0] / told["embeddings"][0][1] == pytest.approx(97.5)
    one = server.http.post("/api/embed", json={"input": "ab", "dimensions": 1}).json()
    assert one["embeddings"] == [[1.0]]
    old = server.http.post(
        "/api/embeddings", json={"prompt": "ab", "options": {"num_ctx": 5}}
    ).json()
    assert old == {"embedding": [97.5 * unit, unit]}
    refused = server.http.post("/api/embed", json={"input": "ab", "dimensions": 3})
    assert refused.status_code == 400
    assert "a row has 2" in refused.json()["error"]
    by_a_worker = {"input": "ab", "padding": "x" * 5000}
    assert server.http.post("/api/embed", json=by_a_worker).json()["prompt_eval_count"] == 2


def test_what_asks_for_no_row_has_the_model_loaded(server: Server) -> None:
    assert server.http.post("/api/embed", json={"model": "fake"}).json() == {
        "model": "fake",
        "embeddings": [],
    }
    assert server.http.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    assert server.http.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
    assert server.http.post("/api/embed", json={"model": "other"}).status_code == 404


def test_a_long_text_is_cut_behind_what_fits_unless_it_says_otherwise() -> None:
    text = "".join(chr(33 + i % 90) for i in range(5000))
    (prompt,) = read(input=text).prompts
    assert bytes(prompt).decode() == text[: SERVED.capacity]
    assert read(OLLAMA_EMBEDDINGS, prompt=text).prompts == (prompt,)
    with client_error(code="context_length_exceeded", param="input"):
        read(input=text, truncate=False)


@pytest.mark.parametrize(
    ("dialect", "fields", "code", "param"),
    [
        (OLLAMA_EMBED, {"input": 5}, "invalid_type", "input"),
        (OLLAMA_EMBED, {"input": ["a", ""]}, "empty_prompt", "input"),
        (OLLAMA_EMBED, {"input": "a", "dimensions": 0}, "invalid_type", "dimensions"),
        (OLLAMA_EMBED, {"input": "a", "model": "other"}, "model_not_found", "model"),
        (OLLAMA_EMBED, {"input": "a", "n": 2}, "unsupported_parameter", "n"),
        (OLLAMA_EMBEDDINGS, {"prompt": ["a"]}, "invalid_type", "prompt"),
    ],
)
def test_refusals(dialect: Any, fields: dict[str, Any], code: str, param: str) -> None:
    with client_error(code=code, param=param):
        read(dialect, **fields)
