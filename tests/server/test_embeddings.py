"""/v1/embeddings, on the engine of the product without a model: of each token its number, and 1."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import openai
import pytest

from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.openai.embeddings import EMBEDDINGS
from support.refusals import client_error

from .conftest import Server, shared
from .test_openai import SERVED

PATH = "/v1/embeddings"


server = shared(flags=("--max-num-batched-tokens", "16"), FAKE_ENGINE="own")


def plain(server: Server, **fields: Any) -> list[list[float]]:
    told = server.http.post(PATH, json={"normalize": False, **fields}).json()
    assert [one["index"] for one in told["data"]] == list(range(len(told["data"])))
    return [one["embedding"] for one in told["data"]]


def test_one_row_for_each_text(server: Server) -> None:
    told = server.http.post(PATH, json={"input": ["ab", "c"], "model": "fake"}).json()
    assert (told["object"], told["model"]) == ("list", "fake")
    assert told["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["object"] for one in told["data"]] == ["embedding"] * 2
    assert all(math.isclose(math.hypot(*one["embedding"]), 1, rel_tol=1e-6) for one in told["data"])
    unit = 2.0**-24
    assert plain(server, input=["ab", "c"]) == [[97.5 * unit, unit], [99 * unit, unit]]
    assert (
        plain(server, input="ab")
        == plain(server, input=[97, 98])
        == plain(server, input=[[97, 98]])
    )
    long = "".join(map(chr, range(33, 120)))  # several chunks
    (row,) = plain(server, input=long)
    assert row[0] == pytest.approx(sum(map(ord, long)) / len(long) * unit)
    assert row[1] == unit


def test_forms_of_a_row(server: Server) -> None:
    (row,) = plain(server, input="ab")
    coded = plain(server, input="ab", encoding_format="base64")[0]
    assert isinstance(coded, str)
    assert list(struct.unpack("<2f", base64.b64decode(coded))) == row
    assert plain(server, input="ab", dimensions=1) == [row[:1]]
    refused = server.http.post(PATH, json={"input": "ab", "dimensions": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        told = client.embeddings.create(model="fake", input=["hello", "there"])  # asks for base64
        assert [len(one.embedding) for one in told.data] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "missing_field", "input"),
        ({"input": ""}, "empty_prompt", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": "x" * 100}, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "pooling": "max"}, "invalid_value", "pooling"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, param: str) -> None:
    raw = json.dumps(fields).encode()
    with client_error(code=code, param=param):
        EMBEDDINGS.read(EMBEDDINGS.decode(raw, NO_LIMITS), SERVED)


def test_a_body_cannot_ask_chats_for_rows(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "embedding": {"pooling": "mean"}}
    assert (
        server.http.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"]
        == "length"
    )
