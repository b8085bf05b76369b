"""Every field of a request with values that nobody sends who means well: an answer or a refusal, never a 500,
never a traceback, never another engine process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.http.api_keys import ANYBODY
from pageturner.ipc.channel import Submit, encode
from pageturner.request import Request
from pageturner.server.admission.service_level import service_level_of
from pageturner.server.api.base.body import RequestBody, decode
from pageturner.server.api.openai.chat import CHAT_COMPLETIONS
from pageturner.server.api.openai.completions import COMPLETIONS

from .conftest import Server
from .test_http import HI, post
from .test_openai import SERVED

DIGITS = "9" * 400
NASTY = (
    DIGITS,
    "-" + DIGITS,
    "9" * 5000,
    "-1",
    "1e308",
    "1e400",
    "1e-40",
    "1e-320",
    '""',
    '"\\ud800"',
    json.dumps("x" * 5000),
    "[[[1]]]",
    "[" * 2000,
    "true",
    "null",
    "{}",
    '{"9e9": 1e308}',
    "[1e400]",
    f"[{DIGITS}]",
    f'{{"{DIGITS}": 1}}',
    f'[{{"role": {DIGITS}}}]',
)
GOOD = {"prompt": '"hello"', "messages": json.dumps(HI), "max_tokens": "1"}
FIELDS = RequestBody.__struct_fields__


def body(name: str, value: str) -> bytes:
    return ("{" + ", ".join(f'"{n}": {v}' for n, v in {**GOOD, name: value}.items()) + "}").encode()


def read(dialect: Any, raw: bytes) -> tuple[int, str]:
    """The status and what is said: as a server does it, up to the bytes that the engine is sent."""
    try:
        fields = decode(raw)
        call = dialect.read(fields, replace(SERVED, developer=True))
        level = service_level_of(fields, [], ANYBODY)
    except ClientError as error:
        return error.status, error.message
    for prompt, params in zip(call.prompts, call.params, strict=True):
        encode(Submit(Request(1, prompt, params, priority=level.priority, tenant=level.tenant)))
    return 200, ""


@pytest.mark.parametrize("dialect", [COMPLETIONS, CHAT_COMPLETIONS], ids=["completions", "chat"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_taken_or_refused(name: str, dialect: Any) -> None:
    for value in NASTY:
        status, message = read(dialect, body(name, value))
        assert status in (200, 400, 404)
        assert len(message) < 600, "nobody is told his own digits"


@pytest.mark.slow
def test_nothing_of_it_brings_a_server_down(start: Callable[..., Server]) -> None:
    server = start("--developer")
    answers = [
        server.http.post("/v1/completions", content=body(name, v))
        for name in FIELDS
        for v in NASTY[:1]
    ]
    assert {answer.status_code for answer in answers} <= {200, 400, 404}
    assert post(server, max_tokens=1).status_code == 200
    assert "Traceback" not in server.log
    assert len(server.notes("start")) == 1
