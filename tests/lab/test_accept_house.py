"""Acceptance of the house without a server: what is asked, what may differ, judgement of figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # goes first: both have a house.py

import house_http as http
import house_others as others
import house_speed as speed
from house_base import Side
from house_http import Answer
from house_refusals import COUNT, asks
from house_requests import FAKE, MODEL, Ask

ASK = Ask(7, MODEL, "POST", "/v1/completions", b"{}")


def answer(body: bytes, status: int = 200, **headers: str) -> Answer:
    return Answer(status, tuple(headers.items()), body)


def event(index: int, text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": index, "text": text}]}).encode()


def test_300_requests_that_leave_nothing_to_chance() -> None:
    every = asks()
    assert len(every) == COUNT
    assert [(ask.number, ask.method, ask.path, ask.body, ask.headers) for ask in every] == [
        (ask.number, ask.method, ask.path, ask.body, ask.headers) for ask in asks()
    ]
    assert len({ask.id for ask in every}) == COUNT
    assert {ask.server for ask in every} == {MODEL, FAKE}
    for ask in every:
        if ask.generates and ask.body and ask.body.startswith(b'{"'):
            body = json.loads(ask.body.replace(b"1e999", b"0"))
            refused = body.get("temperature") in (-0.1, "hot")
            assert refused or body["temperature"] == 0 or "seed" in body, ask.body
    texts = b" ".join(ask.body or b"" for ask in every)
    fields = """stop n best_of use_beam_search logprobs prompt_logprobs echo bad_words logit_bias min_tokens
        ignore_eos response_format structured_outputs priority ttft_target_ms deadline_ms cache_salt stream"""
    for field in fields.split():
        assert f'"{field}":'.encode() in texts, field


def test_nobody_without_a_key_is_asked_for_by_no_header() -> None:
    given = [ask.headers.get("Authorization") for ask in asks() if ask.server == FAKE]
    assert None in given
    assert {"Bearer red-key", "Bearer blue-key", "Bearer admin-key", "Bearer wrong"} <= set(given)


def test_only_what_must_differ_is_masked() -> None:
    body = b'{"id":"cmpl-1","created":%d,"text":"a","usage":{"cached_tokens":%d},"system_fingerprint":"%s"}'
    one, two = (answer(body % values) for values in ((1, 16, b"x"), (22, 16, b"y-z")))
    assert http.difference(ASK, one, two) is None
    cached = answer(body % (1, 32, b"x"))
    assert http.difference(ASK, one, cached) is not None
    assert http.difference(ASK, one, cached, among=True) is None
    other = answer((body % (1, 16, b"x")).replace(b'"a"', b'"b"'))
    told = http.difference(ASK, one, other)
    assert told is not None
    assert '"b"' in told


def test_status_and_headers_count() -> None:
    assert "status 500, was 200" in str(http.difference(ASK, answer(b"{}"), answer(b"{}", 500)))
    then, now = answer(b"{}", 429, retry="1"), answer(b"{}", 429)
    assert "headers" in str(http.difference(ASK, then, now))


def test_choices_of_a_stream_may_interleave_and_nothing_else() -> None:
    usage, done = b'data: {"choices": [], "usage": {}}', b"data: [DONE]"
    parts = [event(0, "a"), event(1, "b"), event(0, "c"), event(1, "d")]
    one = answer(b"\n\n".join([*parts, usage, done, b""]))
    two = answer(b"\n\n".join([parts[0], parts[2], parts[1], parts[3], usage, done, b""]))
    assert http.difference(ASK, one, two) is None
    swapped = answer(b"\n\n".join([parts[2], parts[0], parts[1], parts[3], usage, done, b""]))
    assert http.difference(ASK, one, swapped) is not None
    lost = answer(b"\n\n".join([*parts[:3], usage, done, b""]))
    assert http.difference(ASK, one, lost) is not None


@pytest.mark.parametrize("stream", [False, True])
def test_of_timings_only_the_names_count(stream: bool) -> None:
    def told(**timings: Any) -> Answer:
        body = json.dumps({"choices": [], "timings": [timings]}).encode()
        return answer(b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body)

    timed = Ask(1, MODEL, "POST", "/v1/completions", timed=True)
    assert http.difference(timed, told(e2e_ms=1.0, index=0), told(e2e_ms=2.5, index=0)) is None
    assert http.difference(timed, told(e2e_ms=1.0, index=0), told(e2e_ms=1.0)) is not None


def test_every_difference_fails_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    same, other = {7: answer(b"{}")}, {7: answer(b"[]")}
    assert http.compared("x", [ASK], same, same).passed
    line = http.compared("x", [ASK], same, other)
    assert (line.figure, line.passed) == ("0 of 1 equal", False)
    assert "house-007 POST /v1/completions" in capsys.readouterr().out
    assert not http.compared("x", [], same, same).passed, "nothing compared is nothing shown"


def test_sides_take_turns_and_the_median_is_judged() -> None:
    base, ours = (Side(name, Path("."), Path("python")) for name in ("base", "ours"))
    order: list[str] = []
    figures = iter([10.0, 10.0, 5.0, 10.0, 10.0, 20.0])  # base, ours; ours, base; base, ours

    def measure(side: Side) -> dict[str, float]:
        order.append(side.name)
        return {"a step": next(figures)}

    found = speed.pairs(base, ours, measure, 3)
    assert order == ["base", "ours", "ours", "base", "base", "ours"]
    assert [pair[0]["a step"] / pair[1]["a step"] for pair in found] == [1.0, 2.0, 0.5]
    (line,) = speed.judged(found, {}, "ms")
    assert line.passed
    assert line.figure.startswith("1.000x (3 pairs, 0.500 to 2.000)")
    (line,) = speed.judged(found, {"a step": 1.5}, "ms")
    assert not line.passed
    (line,) = speed.judged(found, {"a step": None}, "ms")
    assert line.passed is None


def test_lines_of_other_scripts_are_understood() -> None:
    assert others.LINE.match("PASS      RSS grows < 20 MB: +1.0 MB from 90 MB, 0 failed\n")
    found = others.LINE.match("NOT RUN   prefix: /data/prefix.jsonl is absent")
    assert found is not None
    assert found.groups() == ("NOT RUN", "prefix", "/data/prefix.jsonl is absent")
    assert others.LINE.match("          (right: 3 s)") is None
    assert others.LINE.match("12 lines, 0 failed, 1 not run") is None


def test_a_missed_bar_of_the_house_fails() -> None:
    figures = {"lines of core": 1600, "import circles": 0, "lines of the path": None}
    said = json.dumps({"figures": figures, "missed": ["lines of core", "lines of the path"]})
    lines = {line.what: (line.figure, line.passed) for line in others.counted(said)}
    assert lines == {
        "house: lines of core": ("1,600", False),
        "house: import circles": ("0", True),
        "house: lines of the path": ("absent", False),
    }


def test_times_of_ci_are_told_or_not_run() -> None:
    (line,) = others.ci(None, 1900.0, 1400.0)
    assert line.figure == "1,400 s, was 1,900 s"
    with pytest.raises(others.NotRun):
        list(others.ci(None, 1900.0, None))
