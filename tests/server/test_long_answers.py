"""Long answers are written in parts: the same bytes, and others go on in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.http import slices
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.http.request_info import RequestInfo
from pageturner.server.api.base import generate, replies
from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.base.replies import InParts, at_once, json_list
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai.completions import read
from pageturner.server.text_workers import text_jobs
from support.refusals import client_error

from .conftest import Server
from .test_openai import SERVED


@pytest.mark.parametrize("count", [0, 1, replies.AT_ONCE, 3 * replies.AT_ONCE + 1])
def test_a_list_in_parts_is_the_list(count: int) -> None:
    entries = [{"é": i, "x": None} for i in range(count)]
    assert bytes(at_once(json_list(iter(entries)))) == replies.encode(entries)


def test_others_go_on_while_something_long_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    rounds = 0

    def long() -> InParts[bytes]:
        for _ in range(5):
            yield
        return b"long"

    async def work() -> None:
        nonlocal rounds
        writing = asyncio.ensure_future(slices.in_slices(long()))
        while not writing.done():
            rounds += 1
            await asyncio.sleep(0)
        assert writing.result() == b"long"

    asyncio.run(work())
    assert rounds >= 5


def test_what_finds_no_memory_to_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(MemoryReserve, "allows", lambda *_: False)

    def long() -> InParts[bytes]:
        yield
        return b"long"

    with client_error(status=503, code="out_of_memory"):
        asyncio.run(slices.in_slices(long(), MemoryReserve()))


def test_many_prompts_are_unpacked_one_after_another() -> None:
    call = read(RequestBody(prompt=["hello", "you", "there"], n=2), SERVED)
    parts = text_jobs.unpack_call(text_jobs.pack_call(call))
    assert [next(parts) for _ in range(3)] == [None] * 3
    with pytest.raises(StopIteration) as end:
        next(parts)
    assert end.value.value.prompts == call.prompts


def test_a_long_answer_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_AT_ONCE", 100)
    content, sent = bytes(range(250)) * 3, list[Any]()

    def long(*_: object) -> InParts[bytes]:
        yield
        return content

    async def send(message: Any) -> None:
        sent.append(message)

    async def check() -> None:
        whole_answer, left = WholeAnswer(1), asyncio.get_running_loop().create_future()
        whole_answer.done.set_result(None)
        asks: Any = SimpleNamespace(call=SimpleNamespace(body=RequestBody()))
        dialect: Any = SimpleNamespace(whole=long)
        service: Any = SimpleNamespace(memory=None)
        answer = generate.Answer([], dialect, asks, service, RequestInfo("id"))
        await answer.send_whole(whole_answer, left, send)

    asyncio.run(check())
    assert b"".join(one["body"] for one in sent[1:]) == content
    assert [(len(one["body"]), one["more_body"]) for one in sent[1:]] == [(100, True)] * 7 + [
        (50, False)
    ]


def chunks(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield from json.loads(line[6:])["choices"]


def test_many_prompt_logprobs_are_the_same_in_a_stream(server: Server) -> None:
    asked = {
        "prompt": "x" * 300,
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "prompt_logprobs": 2,
    }
    whole = server.http.post("/v1/completions", json=asked).json()["choices"][0]
    told = list(chunks(server.http.post("/v1/completions", json={**asked, "stream": True}).text))
    assert told[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == 300 > slices.MANY_LOGPROBS
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [one["logprobs"][name] for one in told if one["logprobs"]]  # type: ignore[index]
        assert [entry for part in parts for entry in part] == whole["logprobs"][name]
