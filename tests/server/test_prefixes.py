"""Pinned prefixes over HTTP: made, listed, deleted, preloaded, and given to an engine that was restarted."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.ipc.channel import Unpin
from pageturner.request import Event
from pageturner.server.engine_client.quarantine import POISON
from pageturner.server.engine_client.supervisor import EngineListener
from pageturner.server.prefixes import MAX_PREFIXES, Prefixes, read_preload_file
from pageturner.text.output_stream import OutputStream
from support.refusals import client_error, engine_fault, refusal_of

from .bytes_tokenizer import BytesTokenizer, answer
from .conftest import Server
from .test_http import HI, post
from .test_quota import table


def make(server: Server, **fields: Any) -> Any:
    return server.http.post("/v1/prefixes", json=fields)


def listed(server: Server) -> list[Any]:
    return [
        (p["id"], p["tokens"], p["status"]) for p in server.http.get("/v1/prefixes").json()["data"]
    ]


def pins(server: Server) -> list[Any]:
    return [note["submit"] for note in server.notes("submit") if note["pin"]]


def test_a_prefix_is_made_listed_and_deleted(start: Callable[..., Server]) -> None:
    server = start()
    made = make(server, id="manual", prompt="read this").json()
    assert (made["id"], made["object"], made["tokens"], made["status"]) == (
        "manual",
        "prefix",
        9,
        "ready",
    )
    chat = make(server, messages=HI, cache_salt="b").json()
    assert listed(server) == [("manual", 9, "ready"), (chat["id"], chat["tokens"], "ready")]
    notes = [note for note in server.notes("submit") if note["pin"]]
    assert [note["salt"] for note in notes] == ["", "b"]
    gone = server.http.delete("/v1/prefixes/manual").json()
    assert gone == {"id": "manual", "object": "prefix", "deleted": True}
    server.until(lambda: server.notes("unpin"))
    assert server.notes("unpin")[0]["unpin"] == notes[0]["submit"]
    assert [id for id, _, _ in listed(server)] == [chat["id"]]
    assert post(server, prompt="read this", max_tokens=3).json()["choices"][0]["text"] == answer(
        "read this", 3
    )


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({}, 400, "missing_field"),
        ({"prompt": ""}, 400, "empty_prompt"),
        ({"prompt": "x" * 3000}, 400, "context_length_exceeded"),
        ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ({"prompt": 5}, 400, "invalid_json"),
    ],
)
def test_what_cannot_be_a_prefix(
    server: Server, fields: dict[str, Any], status: int, reason: str
) -> None:
    response = make(server, **fields)
    assert refusal_of(response) == (status, reason)
    assert listed(server) == []


def test_an_id_cannot_be_used_twice(start: Callable[..., Server]) -> None:
    server = start()
    assert make(server, id="a", prompt="x").status_code == 200
    again = make(server, id="a", prompt="y")
    assert refusal_of(again) == (409, "prefix_exists")
    missing = server.http.delete("/v1/prefixes/b")
    assert refusal_of(missing) == (404, "no_such_prefix")


@pytest.mark.slow
def test_a_restarted_engine_is_given_all_of_them(start: Callable[..., Server]) -> None:
    server = start()
    for name in ("one", "two"):
        make(server, id=name, prompt=name)
    before = pins(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: len(pins(server)) == 4)
    server.until(lambda: listed(server) == [("one", 3, "ready"), ("two", 3, "ready")])
    server.http.delete("/v1/prefixes/one")
    server.until(lambda: server.notes("unpin"))
    assert server.notes("unpin")[0]["unpin"] not in before, "the present engine's own"


@pytest.mark.parametrize(
    "fields", [{"id": "a/b"}, {"id": "a\nb"}, {"id": "x" * 129}, {"cache_salt": "x" * 257}]
)
def test_names_that_could_not_be_deleted_again_are_refused(
    server: Server, fields: dict[str, str]
) -> None:
    response = make(server, prompt="x", **fields)
    (name,) = fields
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error["param"]) == (400, "invalid_value", name)


def test_tenants_have_equal_parts_of_what_may_be_pinned(start: Callable[..., Server]) -> None:
    """4,096 tokens of KV memory: half of them may be pinned, by each of two tenants a quarter."""
    server = start("--api-key", "a:sesame-1,b:sesame-2")

    def ask(key: str, id: str, tokens: int) -> str:
        server.http.headers["authorization"] = f"Bearer sesame-{key}"
        answer = make(server, id=id, prompt=[65] * tokens).json()
        return str(answer.get("status") or answer["error"]["reason"])

    assert ask("1", "one", 1000) == "ready"
    assert ask("1", "two", 20) == "pin_share_exceeded"
    assert ask("2", "one", 1024) == "ready"
    assert ask("2", "two", 1) == "pin_share_exceeded"
    assert server.http.delete("/v1/prefixes/one").status_code == 200
    assert ask("2", "two", 1) == "ready"


def test_what_is_pinned_gives_way_to_a_request_that_would_be_impossible(
    start: Callable[..., Server],
) -> None:
    """1,280 tokens of KV memory, fewer than the context. With the engine of the product, which refuses."""
    server = start("--kv-cache-memory", "1280", "--max-model-len", "2048", FAKE_ENGINE="own")

    def status() -> list[str]:
        return [status for _, _, status in listed(server)]

    for name in ("one", "two"):
        assert make(server, id=name, prompt="x" * 300).json()["status"] == "ready"
    assert (
        make(server, id="three", prompt="x" * 40).json()["error"]["reason"] == "pin_share_exceeded"
    )
    assert post(server, prompt="x" * 600, max_tokens=73).status_code == 200
    whole = post(server, "/v1/chat/completions", messages=HI, ignore_eos=True).json()
    assert whole["usage"]["completion_tokens"] == 652
    assert status() == ["ready", "ready"], "it took what they leave"
    assert post(server, prompt="x" * 600, max_tokens=74).status_code == 200
    assert status() == ["gave_way", "ready"]
    assert post(server, prompt="x" * 1200, max_tokens=81).status_code == 200
    assert status() == ["gave_way", "gave_way"]


def test_a_refused_request_takes_no_prefix_from_anybody(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """It would need the memory of a's prefix, and its key may not ask for so much."""
    file = tmp_path / "keys.toml"
    keys = ("a", 10**6), ("b", 700), ("c", 10**6)
    file.write_text(
        "".join(table(f"k{tenant}", tenant=tenant, max_cost=most) for tenant, most in keys)
    )
    server = start(
        "--kv-cache-memory",
        "1280",
        "--max-model-len",
        "2048",
        "--api-key-file",
        str(file),
        FAKE_ENGINE="own",
    )

    def ask(tenant: str, path: str = "/v1/completions", **fields: Any) -> Any:
        headers = {"authorization": f"Bearer k{tenant}"}
        return server.http.post(path, json=fields, headers=headers)

    def status() -> str:
        told = server.http.get("/v1/prefixes", headers={"authorization": "Bearer ka"}).json()
        return str(told["data"][0]["status"])

    assert ask("a", "/v1/prefixes", id="one", prompt="x" * 200).status_code == 200
    costly = ask("b", prompt="x" * 1000, max_tokens=200)
    assert refusal_of(costly) == (400, "request_too_costly")
    assert status() == "ready"
    assert ask("c", prompt="x" * 1000, max_tokens=200).status_code == 200
    assert status() == "gave_way"


class FakeSupervisor:
    """Computes nothing until told; notes what it should let go."""

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []
        self.unpinned: list[int] = []
        self.listeners: list[EngineListener] = []

    def restarted(self) -> None:
        self.listeners[0].ready()

    def check_open(self, streams: list[OutputStream]) -> None:
        pass

    def open(self, streams: list[OutputStream]) -> None:
        self.streams += streams

    def tell(self, message: Unpin) -> None:
        self.unpinned.append(message.id)

    def finish(self) -> None:
        stream = self.streams.pop()
        position = len(stream.request.prompt)
        stream.add_event(Event(stream.request.id, 0, position, (7,), finish="length"), 0.0)


@pytest.mark.parametrize("tenants", [2, 4])
def test_tenants_have_equal_parts_of_the_places(tenants: int) -> None:
    async def fill(tenant: str, count: int) -> int:
        for number in range(count):
            asyncio.ensure_future(prefixes.add(f"p{number}", (1,), "", tenant))  # noqa: RUF006
            await asyncio.sleep(0)
        known[0] = tenants  # the keys are read again
        with client_error(code="too_many_prefixes"):
            await prefixes.add("more", (1,), "", tenant)
        return sum(prefix.tenant == tenant for prefix in prefixes)

    known = [2]
    prefixes = Prefixes(FakeSupervisor(), BytesTokenizer(), itertools.count(5), lambda: known[0])  # type: ignore[arg-type]
    assert asyncio.run(fill("a", MAX_PREFIXES // tenants)) == MAX_PREFIXES // tenants


def test_one_that_is_deleted_while_it_is_computed_is_let_go() -> None:
    async def delete(*, early: bool) -> list[int]:
        supervisor = FakeSupervisor()
        prefixes = Prefixes(supervisor, BytesTokenizer(), itertools.count(5))  # type: ignore[arg-type]
        made = asyncio.ensure_future(prefixes.add("a", (1, 2), ""))
        await asyncio.sleep(0)
        if early:
            prefixes.remove("a")
            supervisor.unpinned.clear()  # too early: the engine keeps nothing yet
        supervisor.finish()
        assert (await made).status == ("deleted" if early else "ready")
        return supervisor.unpinned

    assert asyncio.run(delete(early=True)) == [5]
    assert asyncio.run(delete(early=False)) == []


def test_one_that_brings_the_engine_down_is_computed_no_more() -> None:
    """Else every engine would end with it, for ever."""

    async def tries() -> int:
        supervisor = FakeSupervisor()
        prefixes = Prefixes(supervisor, BytesTokenizer(), itertools.count(5))  # type: ignore[arg-type]
        made = asyncio.ensure_future(prefixes.add("a", (1, 2), ""))
        await asyncio.sleep(0)
        supervisor.finish()
        await made
        for tried in range(5):
            supervisor.restarted()
            if not supervisor.streams:
                return tried
            supervisor.streams.pop().fail(POISON)
        return 5

    assert asyncio.run(tries()) == 1


def test_prefixes_are_preloaded(start: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text('{"id": "a", "prompt": "one"}\n\n{"prompt": [1, 2]}\n{"prompt": ""}\n')
    server = start("--preload", str(file))
    server.until(lambda: "2 of 3 prefixes are kept" in server.log)
    assert listed(server) == [("a", 3, "ready"), ("preload-2", 2, "ready")]
    assert "preload-3 is not kept" in server.log


def test_a_text_file_is_one_prefix(tmp_path: Path) -> None:
    file = tmp_path / "manual.txt"
    file.write_text("line one\nline two\n")
    (body,) = read_preload_file(file)
    assert (body.id, body.prompt) == ("manual", "line one\nline two\n")
    with engine_fault("cannot read"):
        read_preload_file(tmp_path / "absent")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    with engine_fault("line 2"):
        read_preload_file(tmp_path / "bad.jsonl")
