"""Lines of batches: what is wrong with one, what each asks, and the form that uploads have."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from pageturner.http.multipart import boundary_of, read_form
from pageturner.server.api.batches.batch_lines import (
    BadLine,
    answer_line,
    lines_of,
    looked_at,
    parse_line,
    question_of,
    tokens_of,
)
from pageturner.server.api.batches.batch_pages import seconds_of
from support.refusals import client_error

TEXT = "/v1/completions"


def line(**fields: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": TEXT, "body": {"prompt": "hello"}} | fields
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("raw", "code", "custom_id"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_line", None),
        (b'{"custom_id": "a"}', "invalid_line", "a"),
        (line(custom_id=3), "invalid_line", None),
        (line(custom_id=""), "invalid_custom_id", None),
        (line(custom_id="x" * 513), "invalid_custom_id", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "a"),
        (line(body=[1]), "invalid_line", "a"),
        (line(body={"stream": True}), "unsupported_parameter", "a"),
        (line(body={"prompt": "x" * 6000}), "line_too_long", "a"),
        (b'{"custom_id": "\\ud800", "url": 1}', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "line_too_long", None),
    ],
)
def test_what_is_wrong_with_a_line(raw: bytes, code: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(raw, TEXT, 1000)
    assert caught.value.code == code
    assert caught.value.custom_id in (custom_id, None if code == "line_too_long" else custom_id)


def test_a_line_may_leave_the_method_away_and_say_null() -> None:
    raw = b'{"custom_id":"a","url":"/v1/completions","body":{"stream":null,"prompt":"x"}}'
    assert parse_line(raw, TEXT, 1000).custom_id == "a"
    assert parse_line(line(url="/v1/embeddings"), "", 1000).url == "/v1/embeddings"


def test_the_seed_follows_from_the_line_and_what_means_nothing_is_left_out() -> None:
    first, second = question_of(line(), 1), question_of(line(), 2)
    assert question_of(line(), 1) == first
    assert json.loads(first.body)["seed"] != json.loads(second.body)["seed"]
    assert json.loads(question_of(line(body={"seed": 7, "priority": -5}), 1).body) == {"seed": 7}
    assert json.loads(question_of(line(url="/v1/embeddings", body={}), 1).body) == {}
    assert (
        json.loads(question_of(line(url="/v1/responses", body={"seed": 1}), 1).body)["store"]
        is False
    )


def test_lines_are_found_by_place_and_counted_as_editors_do() -> None:
    content = b'{"a":1}\n\n  \n{"b":2}\n' + b"x" * 9000 + b'\n{"c":3}'
    found = list(lines_of(io.BytesIO(content), 0, 0, 100))
    assert [(number, content[begin : begin + size]) for number, begin, size, _ in found] == [
        (1, b'{"a":1}\n'),
        (4, b'{"b":2}\n'),
        (5, b"x" * 9000 + b"\n"),
        (6, b'{"c":3}'),
    ]
    assert max(len(raw) for *_, raw in found) < 5000  # of a long line the beginning
    number, begin, size, _ = found[1]
    assert list(lines_of(io.BytesIO(content), begin + size, number, 100)) == found[2:]


def test_a_bad_line_is_told_with_its_number() -> None:
    bad, problem = looked_at((7, 100, 5, b"{bad\n"), TEXT, 1000)
    assert bad.answer is not None
    assert problem is not None
    assert (problem["line"], json.loads(bad.answer)["error"]["message"][:7]) == (7, "line 7:")


def test_answers_keep_the_bytes_of_a_body() -> None:
    told = answer_line("a", "r", 200, b'{"x": 1.50}')
    assert b'"body":{"x": 1.50}' in told
    assert json.loads(answer_line("a", "r", 200, b'{\n"x": 1}'))["response"]["body"] == {"x": 1}
    assert b"\n" not in answer_line("a", "r", 200, b'{\n"x": 1}')
    assert json.loads(answer_line("a", "r", 502, b"no json"))["response"]["body"] == "no json"


def test_tokens_by_either_name() -> None:
    assert tokens_of(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}') == (3, 4)
    assert tokens_of(b'{"usage":{"input_tokens":3,"output_tokens":4}}') == (3, 4)
    assert tokens_of(b"no json") == (0, 0)


@pytest.mark.parametrize("window", ["", "24", "0h", "h", "99999h", "31d", "1s", "24 h"])
def test_windows_that_are_none(window: str) -> None:
    with client_error():
        seconds_of(window)
    assert (seconds_of("24h"), seconds_of("30d"), seconds_of("1m")) == (86_400, 30 * 86_400, 60)


# -- forms ---------------------------------------------------------------------------------------------------
FORM = (
    b'preamble\r\n--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n%s\r\n--xyz--\r\nepilogue"
)


def read(content: bytes, cuts: list[int]) -> tuple[dict[str, str], str | None, bytes]:
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    pieces = [content[a:b] for a, b in itertools.pairwise(places)] or [b""]
    taken = bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def take(piece: bytes) -> None:
        taken.extend(piece)

    fields, name = asyncio.run(read_form(receive, b"xyz", take))
    return fields, name, bytes(taken)


@given(st.binary(max_size=60), st.lists(st.integers(0, 400), max_size=12))
def test_a_form_is_the_same_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    whole = content.replace(b"--xyz", b"--xy")
    assert read(FORM % whole, cuts) == ({"purpose": "batch"}, 'a "b".jsonl', whole)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no form at all",
        FORM[:-20],
        b"--xyz\r\n" + b"x" * 9000,
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 5000 + b"\r\n--xyz--",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 20 + b"--xyz--",
    ],
)
def test_what_is_no_form_is_refused(content: bytes) -> None:
    with client_error(code="invalid_form"):
        read(content, [10])


def test_only_forms_with_a_boundary_are_taken() -> None:
    assert boundary_of('multipart/form-data; charset=x; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data;boundary=ab") == b"ab"
    for kind in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with client_error(status=415):
            boundary_of(kind)
