"""Long answers are written in parts: the same bytes, and others go on in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from pageturner.errors import ClientError
from pageturner.serve import long_answer, replies
from pageturner.serve.memory_reserve import MemoryReserve
from pageturner.serve.replies import InParts, at_once, json_list

from .conftest import Server


@pytest.mark.parametrize("count", [0, 1, replies.AT_ONCE, 3 * replies.AT_ONCE + 1])
def test_a_list_in_parts_is_the_list(count: int) -> None:
    entries = [{"é": i, "x": None} for i in range(count)]
    assert bytes(at_once(json_list(iter(entries)))) == replies.encode(entries)


def test_others_go_on_while_something_long_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answer, "SLICE_SECONDS", 0.0)
    rounds = 0

    def long() -> InParts[bytes]:
        for _ in range(5):
            yield
        return b"long"

    async def work() -> None:
        nonlocal rounds
        writing = asyncio.ensure_future(long_answer.written(long(), MemoryReserve()))
        while not writing.done():
            rounds += 1
            await asyncio.sleep(0)
        assert writing.result() == b"long"

    asyncio.run(work())
    assert rounds >= 5


def test_what_finds_no_memory_to_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answer, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(MemoryReserve, "allows", lambda *_: False)

    def long() -> InParts[bytes]:
        yield
        return b"long"

    with pytest.raises(ClientError) as caught:
        asyncio.run(long_answer.written(long(), MemoryReserve()))
    assert (caught.value.status, caught.value.code) == (503, "out_of_memory")


def chunks(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield from json.loads(line[6:])["choices"]


def test_many_prompt_logprobs_are_the_same_in_a_stream(server: Server) -> None:
    asked = {"prompt": "x" * 300, "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 2}
    whole = server.http.post("/v1/completions", json=asked).json()["choices"][0]
    told = list(chunks(server.http.post("/v1/completions", json={**asked, "stream": True}).text))
    assert told[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == 300 > long_answer.MANY_LOGPROBS
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [one["logprobs"][name] for one in told if one["logprobs"]]  # type: ignore[index]
        assert [entry for part in parts for entry in part] == whole["logprobs"][name]
