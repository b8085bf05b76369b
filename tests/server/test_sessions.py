"""Sessions over HTTP: every shape of the API takes them, tenants have their own, and they survive a crash."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pageturner.errors import ClientError
from pageturner.http.api_keys import ANYBODY, ApiKey
from pageturner.http.request_info import RequestInfo
from pageturner.ipc.channel import Ready, Stats
from pageturner.ipc.session_messages import KeptSession, ReleaseSession, RestoreSession
from pageturner.kernels.cpu import native_module
from pageturner.params import SamplingParams
from pageturner.request import Request, SessionHint
from pageturner.server.admission.quota import Quota
from pageturner.server.engine_client.supervisor import EngineListener
from pageturner.server.sessions import ServedSessions
from support.refusals import refusal_of
from support.servers import serving

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
PROMPT = list(range(5, 150))


def ask(client: httpx.Client, prompt: list[int], session: Any, **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": 20,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = client.post("/v1/completions", json={**body, "session": session})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def said(prompt: list[int], answer: dict[str, Any]) -> list[int]:
    return [*prompt, *answer["choices"][0]["token_ids"]]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def shown(client: httpx.Client, id: str, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The session, as soon as it is as wanted."""
    until = time.monotonic() + 20
    while not wanted(one := client.get(f"/v1/sessions/{id}").json()):
        assert time.monotonic() < until, one
        time.sleep(0.02)
    return dict(one)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(GOLDEN) as client:
        yield client


def test_a_conversation_is_kept_told_and_released(client: httpx.Client) -> None:
    first = ask(client, PROMPT, {"id": "conv", "keep": 30, "next_in": 0.5})
    one = shown(client, "conv", lambda one: one["kept_tokens"])
    assert (one["status"], one["turns"], one["tokens"], one["kept_tokens"]) == ("kept", 1, 165, 160)
    assert one["kept"]["paid_tokens"] == 160
    prompt = [*said(PROMPT, first), 7, 8, 9]
    second = ask(client, prompt, "conv")
    assert cached(second) == 160
    one = shown(client, "conv", lambda one: one["kept_tokens"] > 160)
    assert one["last_turn"] == {"prompt_tokens": 168, "cached_tokens": 160}
    assert one["kept"]["token_seconds"] > 0
    assert one["kept"]["byte_seconds"] > one["kept"]["token_seconds"]
    gone = client.delete("/v1/sessions/conv").json()
    assert gone == {"id": "conv", "object": "session", "deleted": True}
    missing = client.get("/v1/sessions/conv")
    assert refusal_of(missing) == (404, "no_such_session")


def test_a_fork_and_the_last_turn(client: httpx.Client) -> None:
    first = ask(client, PROMPT, "parent")
    ask(client, [*said(PROMPT, first), 4], {"id": "fork", "fork_of": "parent"})
    one = shown(client, "fork", lambda one: one["kept_tokens"])
    assert 0 < one["kept"]["paid_tokens"] < one["kept_tokens"], "what it shares is paid for once"
    ask(client, [*said(PROMPT, first), 4, 5], {"id": "fork", "release": True})
    assert client.get("/v1/sessions/fork").status_code == 404
    assert [one["id"] for one in client.get("/v1/sessions").json()["data"]] == ["parent"]
    client.delete("/v1/sessions/parent")


HI = [{"role": "user", "content": "Hello"}]
SHAPES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "Hello"},
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_shape_takes_one(client: httpx.Client, path: str, stream: bool) -> None:
    limit = {"options": {"num_predict": 4}} if path.startswith("/api/") else {}
    body = {
        "model": "tiny_llama",
        **SHAPES[path],
        **limit,
        "session": {"id": "s", "keep": 5},
        "stream": stream,
    }
    if path == "/v1/chat/completions" or path == "/v1/completions":
        body["max_tokens"] = 4
    if path == "/v1/responses":
        body["max_output_tokens"] = 4
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert shown(client, "s", lambda one: one.get("turns"))["open_turns"] == 0
    client.delete("/v1/sessions/s")


def test_the_header_names_one_and_the_body_goes_before_it(client: httpx.Client) -> None:
    named = {"X-Session-Id": "by-header"}
    client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, headers=named)
    assert client.delete("/v1/sessions/by-header").status_code == 200
    body = {"prompt": "Hello", "max_tokens": 2, "session": "by-body"}
    client.post("/v1/completions", json=body, headers=named)
    assert client.delete("/v1/sessions/by-header").status_code == 404
    assert client.delete("/v1/sessions/by-body").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session": {"keep": 1}}, "session"),
        ({"session": {"id": "a", "kep": 1}}, "session"),
        ({"session": {"id": "a/b"}}, "session.id"),
        ({"session": {"id": "a", "fork_of": "a b"}}, "session.fork_of"),
        ({"session": {"id": "a", "keep": -1}}, "session"),
        ({"session": {"id": "a", "keep": 1e9}}, "session"),
        ({"session": {"id": "a", "next_in": -1}}, "session"),
        ({"session": {"id": "a", "supersede": "yes"}}, "session"),
        ({"session": 3}, "session"),
        ({"session": "a", "n": 2}, "session"),
        ({"session": "a", "use_beam_search": True, "n": 2, "temperature": 0}, "session"),
        ({"session": "a", "prompt": ["x", "y"]}, "session"),
    ],
)
def test_what_no_session_can_have(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert client.get("/v1/sessions").json()["data"] == []


@pytest.mark.slow
def test_tenants_have_their_own_and_pay_for_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(f"key-{name}".encode()).hexdigest() for name in ("red", "blue")}
    keys.write_text(
        "".join(
            f'[[keys]]\ntenant = "{name}"\nsha256 = "{one}"\nsession_share = 0.5\n'
            for name, one in digests.items()
        )
    )
    with serving(GOLDEN, "--api-key-file", str(keys)) as client:
        client.headers["authorization"] = "Bearer key-red"
        first = ask(client, PROMPT, "mine")
        shown(client, "mine", lambda one: one["kept_tokens"])
        client.headers["authorization"] = "Bearer key-blue"
        assert client.get("/v1/sessions").json()["data"] == []
        assert client.get("/v1/sessions/mine").status_code == 404
        assert client.delete("/v1/sessions/mine").status_code == 404
        forked = ask(client, [*said(PROMPT, first), 4], {"id": "mine", "fork_of": "mine"})
        assert cached(forked) == 0, "no fork of somebody else's"
        client.headers["authorization"] = "Bearer key-red"
        assert cached(ask(client, [*said(PROMPT, first), 4], "mine")) == 160


def engine_of(client: httpx.Client) -> int:
    """Its process."""
    state = client.get("/v1/admin/state", headers={"authorization": "Bearer k"}).json()
    return int(state["engine"]["pid"] or 0)


@pytest.mark.slow
@pytest.mark.skipif(
    not native_module.supported()[0], reason="KV survives with the native kernels only"
)
def test_a_kept_conversation_is_found_again_when_the_engine_was_killed() -> None:
    with serving(GOLDEN, "--admin-key", "k") as client:
        first = ask(client, PROMPT, {"id": "conv", "keep": 60})
        shown(client, "conv", lambda one: one["kept_tokens"])
        killed = engine_of(client)
        os.kill(killed, signal.SIGKILL)
        until = time.monotonic() + 20
        while client.get("/health").status_code != 200 or engine_of(client) == killed:
            assert time.monotonic() < until
        one = shown(client, "conv", lambda one: one["kept_tokens"])
        assert (one["status"], one["kept_tokens"]) == ("kept", 160)
        assert cached(ask(client, [*said(PROMPT, first), 1], "conv")) == 160


# -- what the API process remembers --------------------------------------------------------------------------
class Stub:
    """A supervisor that only remembers what it was told to tell."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ready = Ready(2048, 8, 16, 100, 8 * 16 * 100, "f", {}, kv_blocks_taken_back=3)
        self.listeners: list[EngineListener] = []

    def restart(self) -> None:
        self.listeners[0].ready()

    def keeps(self, *sessions: KeptSession) -> None:
        self.listeners[0].received(Stats({}, list(sessions)))

    def tell(self, message: Any) -> None:
        self.told.append(message)


class Registry:
    def __init__(self, most: int = 3) -> None:
        self.supervisor, self.now = Stub(), 0.0
        self.quota = Quota(8, 8, lambda: self.now)
        self.sessions = ServedSessions(self.supervisor, self.quota, most, lambda: self.now)  # type: ignore[arg-type]

    def begin(self, id: str, tenant: str = "", key: ApiKey = ANYBODY, **hint: Any) -> Any:
        session = SessionHint(f"{tenant}/{id}", keep=60.0, **hint)
        request = Request(1, tuple(range(40)), SamplingParams(), session=session, salt=tenant)
        stream: Any = SimpleNamespace(request=request, tokens=[1, 2], cached=0)
        self.sessions.begin(stream, RequestInfo("r", tenant, key=key))
        return stream

    def turn(self, id: str, tenant: str = "", **more: Any) -> None:
        self.sessions.end(self.begin(id, tenant, **more))

    def names(self) -> list[str]:
        return [
            f"{tenant}/{one.id}"
            for tenant in ("", "red", "blue")
            for one in self.sessions.of(tenant)
        ]


def test_beyond_their_number_the_one_used_least_recently_goes_of_whoever_has_most() -> None:
    registry = Registry()
    registry.turn("a", "red")
    for id in "bcd":
        registry.turn(id, "blue")
    assert registry.names() == ["red/a", "blue/c", "blue/d"]
    assert registry.supervisor.told == [ReleaseSession("blue/b")]


def test_one_with_an_open_turn_is_not_the_one_that_goes() -> None:
    registry = Registry(2)
    streams = [registry.begin("a"), registry.begin("b")]
    registry.turn("c")
    assert registry.names() == ["/a", "/b", "/c"]
    for stream in streams:
        registry.sessions.end(stream)


def test_the_tokens_that_are_remembered_are_bounded_by_the_memory_for_kv() -> None:
    registry = Registry(10)
    for id in "abcd":  # 42 tokens each, and 128 of KV memory
        registry.turn(id)
    held = [bool(registry.sessions.find(id, "").tokens) for id in "abcd"]
    assert held == [False, True, True, True]
    registry.supervisor.restart()
    told = registry.supervisor.told
    assert [(type(one), one.hint.name, len(one.tokens)) for one in told] == [
        (RestoreSession, f"/{id}", 168) for id in "bcd"
    ]


def test_what_is_kept_is_charged_to_the_key_across_engines() -> None:
    registry, key = Registry(), ApiKey("red", b"digest", tokens_per_minute=1000)
    registry.turn("a", "red", key=key)
    account = registry.quota._account(key)
    registry.supervisor.keeps(KeptSession("red/a", 32, 32, 6000.0, 1, 0))
    assert account.used == 10
    registry.supervisor.restart()
    registry.supervisor.keeps(KeptSession("red/a", 32, 32, 3000.0, 1, 0))
    assert account.used == 15
    registry.supervisor.keeps(KeptSession("red/nobody", 32, 32, 9e9, 1, 0))
    one = registry.sessions.as_dict(registry.sessions.find("a", "red"))
    assert one["kept"] == {
        "paid_tokens": 32,
        "token_seconds": 9000.0,
        "byte_seconds": 900_000,
        "price": 15,
    }


def test_who_has_paid_for_what_it_keeps_has_less_to_ask_for() -> None:
    registry, key = Registry(), ApiKey("red", b"digest", tokens_per_minute=600)
    registry.turn("a", "red", key=key)
    registry.supervisor.keeps(KeptSession("red/a", 32, 32, 600 * 700.0, 1, 0))
    with pytest.raises(ClientError) as refused, registry.quota.work(key):
        pass
    assert refused.value.code == "token_rate_limit"


@pytest.mark.slow
def test_of_a_released_one_nothing_is_remembered() -> None:
    registry = Registry()
    registry.turn("a", release=True)
    registry.turn("b")
    registry.sessions.release(registry.sessions.find("b", ""))
    assert len(registry.sessions) == 0
    assert registry.sessions._remembered == 0
