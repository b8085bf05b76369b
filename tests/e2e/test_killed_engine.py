"""A server whose engine is killed under its streams goes on with its KV, and no text changes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pageturner.kernels.cpu import native_module
from support.engines import GOLDENS
from support.servers import serving

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
import dialect_jobs

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
STREAMS, TOKENS = 4, 400


def text_of(client: httpx.Client, number: int, then: Callable[[], None] = lambda: None) -> str:
    """A streamed answer. then: done at its 20th token."""
    body = {
        "prompt": f"the old house {number}",
        "max_tokens": TOKENS,
        "seed": number,
        "temperature": 1.0,
    }
    text, chunks = "", 0
    with client.stream(
        "POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                chunks += 1
                if chunks == 20:
                    then()
    return text


def kill(server: int) -> None:
    with open(f"/proc/{server}/task/{server}/children") as children:
        os.kill(min(map(int, children.read().split())), signal.SIGKILL)


@pytest.mark.slow
def test_kill_9_under_streams() -> None:
    with (
        serving(GOLDENS / "tiny_llama.gguf", "--kv-cache-dtype", "int8") as client,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        whole = list(pool.map(lambda n: text_of(client, n), range(STREAMS)))
        server = next(int(pid) for pid in children_of(os.getpid()) if is_server(pid))
        others = [pool.submit(text_of, client, n) for n in range(1, STREAMS)]
        assert text_of(client, 0, lambda: kill(server)) == whole[0]
        assert [other.result(60) for other in others] == whole[1:]
        metrics = client.get("/metrics").text
    assert value(metrics, "engine_restarts_total") == 1
    assert value(metrics, "kv_blocks_taken_back_total") > 0


NUMBERS = {"properties": {"list": {"type": "array", "minItems": 40, "items": {"type": "integer"}}}}
NUMBERS |= {"required": ["list"], "additionalProperties": False}
SUM = [{"type": "function", "function": {"name": "sum", "parameters": NUMBERS}}]


def calls_of(
    client: httpx.Client, number: int, then: Callable[[], None] = lambda: None
) -> list[str]:
    """What each delta of a streamed call says, and why the answer ended. then: done at the 20th."""
    body = {
        "messages": [{"role": "user", "content": f"the old house {number}"}],
        **{
            "tools": SUM,
            "tool_choice": "required",
            "seed": number,
            "max_tokens": TOKENS,
            "stream": True,
        },
    }
    said: list[str] = []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                calls = choice["delta"].get("tool_calls", [])
                said += [
                    call["function"].get("name", "") + call["function"]["arguments"]
                    for call in calls
                ]
                said += [choice["finish_reason"]] if choice["finish_reason"] else []
                if len(said) == 20:
                    then()
    return said


@pytest.mark.slow
def test_kill_9_in_the_midst_of_calls() -> None:
    with (
        serving(GOLDENS / "tiny_llama.gguf", "--tool-call-parser", "hermes") as client,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        whole = list(pool.map(lambda n: calls_of(client, n), range(STREAMS)))
        assert all(one[0] == "sum" and len(one) > 40 for one in whole)
        server = next(int(pid) for pid in children_of(os.getpid()) if is_server(pid))
        others = [pool.submit(calls_of, client, n) for n in range(1, STREAMS)]
        assert calls_of(client, 0, lambda: kill(server)) == whole[0]
        assert [other.result(60) for other in others] == whole[1:]
        assert value(client.get("/metrics").text, "engine_restarts_total") == 1


@pytest.mark.slow
def test_kill_9_under_every_dialect() -> None:
    with serving(GOLDENS / "tiny_llama.gguf", *dialect_jobs.FLAGS) as client:
        url = str(client.base_url)
        asked = [
            dialect_jobs.as_stream(one)
            for one in dialect_jobs.asks(dialect_jobs.marks(url), tokens=40)
        ]
        asked += dialect_jobs.rows()
        response = next(one for one in asked if one.path == dialect_jobs.RESPONSES)
        asked.append(dialect_jobs.in_background(dialect_jobs.in_one_piece(response)))
        server = next(int(pid) for pid in children_of(os.getpid()) if is_server(pid))
        pieces = itertools.count(1)

        def answer(number: int, deadly: int) -> list[bytes]:
            def seen(_: bytes) -> None:
                if next(pieces) == deadly:
                    kill(server)

            status, raw = dialect_jobs.whole_answer(url, asked[number], f"r{number}", seen)
            assert status == 200, (asked[number].name, raw)
            return dialect_jobs.events_of(asked[number], dialect_jobs.same_bytes(raw))

        with ThreadPoolExecutor(len(asked)) as pool:
            undisturbed = list(pool.map(lambda number: answer(number, 0), range(len(asked))))
            pieces = itertools.count(1)
            disturbed = list(pool.map(lambda number: answer(number, 60), range(len(asked))))
        for one, was, now in zip(asked, undisturbed, disturbed, strict=True):
            assert now == was, one.name
        assert asked[-1].background
        assert value(client.get("/metrics").text, "engine_restarts_total") == 1


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return children.read().split()


def is_server(pid: str) -> bool:
    with open(f"/proc/{pid}/cmdline") as command:
        return "\0pageturner\0serve\0" in command.read()


def value(metrics: str, name: str) -> float:
    found = re.search(rf"^pageturner:{name}\{{.*\}} (\S+)$", metrics, re.M)
    assert found, name
    return float(found[1])
