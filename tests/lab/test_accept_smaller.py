"""Comparison of two sides without a server: the requests, what may differ, the judgement of figures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # goes first: both have a house.py

import same_answers as answers
import same_faces as faces
import same_speed as speed
import smaller
from same_answers import FAKE, MODEL, Answer, Ask, asks
from sides import Side

COUNT = 300
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
    assert answers.difference(ASK, one, two) is None
    cached = answer(body % (1, 32, b"x"))
    assert answers.difference(ASK, one, cached) is not None
    assert answers.difference(ASK, one, cached, together=True) is None
    other = answer((body % (1, 16, b"x")).replace(b'"a"', b'"b"'))
    told = answers.difference(ASK, one, other)
    assert told is not None
    assert '"b"' in told


def test_status_and_headers_count() -> None:
    assert "status 500, was 200" in str(answers.difference(ASK, answer(b"{}"), answer(b"{}", 500)))
    then, now = answer(b"{}", 429, retry="1"), answer(b"{}", 429)
    assert "headers" in str(answers.difference(ASK, then, now))


def test_choices_of_a_stream_may_interleave_and_nothing_else() -> None:
    usage, done = b'data: {"choices": [], "usage": {}}', b"data: [DONE]"
    parts = [event(0, "a"), event(1, "b"), event(0, "c"), event(1, "d")]
    one = answer(b"\n\n".join([*parts, usage, done, b""]))
    two = answer(b"\n\n".join([parts[0], parts[2], parts[1], parts[3], usage, done, b""]))
    assert answers.difference(ASK, one, two) is None
    swapped = answer(b"\n\n".join([parts[2], parts[0], parts[1], parts[3], usage, done, b""]))
    assert answers.difference(ASK, one, swapped) is not None
    lost = answer(b"\n\n".join([*parts[:3], usage, done, b""]))
    assert answers.difference(ASK, one, lost) is not None


@pytest.mark.parametrize("stream", [False, True])
def test_of_timings_only_the_names_count(stream: bool) -> None:
    def told(**timings: Any) -> Answer:
        body = json.dumps({"choices": [], "timings": [timings]}).encode()
        return answer(b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body)

    timed = Ask(1, MODEL, "POST", "/v1/completions", timed=True)
    assert answers.difference(timed, told(e2e_ms=1.0, index=0), told(e2e_ms=2.5, index=0)) is None
    assert answers.difference(timed, told(e2e_ms=1.0, index=0), told(e2e_ms=1.0)) is not None


def test_every_difference_fails_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    same, other = {7: answer(b"{}")}, {7: answer(b"[]")}
    assert answers.compared("x", [ASK], (same, same)).passed
    line = answers.compared("x", [ASK], (same, other))
    assert (line.figure, line.passed) == ("0 of 1 equal", False)
    assert "house-007 POST /v1/completions" in capsys.readouterr().out
    assert not answers.compared("x", [], (same, same)).passed, "nothing compared is nothing shown"


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
    (line,) = speed.judged(found, "ms")
    assert line.passed
    assert line.figure.startswith("1.000x (3 pairs, 0.500 to 2.000)")
    slower = [({"a step": 1.0}, {"a step": 1.02})]
    (line,) = speed.judged(slower, "ms")
    assert not line.passed
    (line,) = speed.judged([({"engine step, 64": 1.0}, {"engine step, 64": 1.02})], "us")
    assert line.passed is None


def test_a_stall_is_a_gap_beyond_the_median() -> None:
    names = [f"gap {q} {speed.GAP}" for q in ("p50", "p99")]
    found = [
        (dict(zip(names, (2.0, 18.0), strict=True)), dict(zip(names, (2.0, 2.5), strict=True)))
    ]
    line = speed.stall(found)
    assert (line.figure, line.passed) == ("1.25x, was 9.00x", True)
    assert not speed.stall([(ours, base) for base, ours in found]).passed


def test_a_difference_that_is_not_meant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    base, ours = {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}
    assert not faces.compared("x", base, ours).passed
    monkeypatch.setattr(faces, "MEANT", {"b": "why", "c": "new"})
    assert faces.compared("x", base, ours).passed
    assert not faces.compared("x", base, {"b": "2"}).passed
    assert not faces.compared("x", {}, {}).passed, "nothing compared is nothing shown"


def test_rows_of_the_status_page_and_what_they_name() -> None:
    page = "| row | state | test |\n|--|--|--|\n| a | there | `tests/lab`, `make accept NAME=smaller` |\n"
    assert faces.rows(page) == {"a": ["tests/lab", "make accept NAME=smaller"]}
    assert faces.named_and_absent(["tests/lab", "make accept NAME=smaller", "--only x"]) == []
    assert faces.named_and_absent(["tests/none.py", "make accept NAME=none"]) == [
        "tests/none.py",
        "bench/accept/none.py",
    ]


def test_a_figure_above_what_is_wanted_fails() -> None:
    figures = dict.fromkeys([*smaller.WANTED, *smaller.WANTED_PER_1000], 0) | {"names MOST_": 1}
    found = {"figures": figures, "missed": ["names MOST_"], "rooms": [{"lines": 1000}]}
    failed = [line.what for line in smaller.counted(found) if line.passed is False]
    assert failed == ["house: figures within their bars", "house: names MOST_, at most 0"]
    figures["tuple assignments"] = 7
    assert not next(line for line in smaller.counted(found) if "tuple" in line.what).passed


def test_busy_loops_are_ended() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text().split()
    with smaller.busy(2):
        assert len(children.read_text().split()) == len(before) + 2
    assert children.read_text().split() == before


def test_times_of_ci_are_given_or_not_run() -> None:
    given = argparse.Namespace(ci=False, ci_before=1900.0, ci_after=1400.0)
    (line,) = smaller.ci(given)
    assert (line.figure, line.passed) == ("1,400 s, was 1,900 s", True)
    given.ci_after = None
    with pytest.raises(smaller.NotRun):
        list(smaller.ci(given))
