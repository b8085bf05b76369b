"""LoRA adapters under Ray Serve: who knows of them, who gets their requests, what reaches all replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner.models.load import open_model
from pageturner.router.ray.adapters import MAX_CHANGES, AdapterChange, AdapterTable
from pageturner.router.ray.choice import WORTH, Ask, Choice, choice_of
from pageturner.router.ray.door import Door
from pageturner.router.ray.replica import ModelReplica
from pageturner.router.ray.settings import settings_of
from support.adapters import ALL, write_adapter
from support.engines import GOLDENS

A, B, C = "replica-a", "replica-b", "replica-c"
RED, BLUE = AdapterChange("red", "/red"), AdapterChange("blue", "/blue")
TINY = GOLDENS / "tiny_llama.gguf"
KEY = {"authorization": "Bearer secret"}


def test_tables_become_one_in_any_order() -> None:
    first, second = AdapterTable({"red": "/red"}), AdapterTable({"red": "/red"})
    loaded = first.next("blue", "/blue")
    first.note(loaded)
    gone = second.next("red", "")
    second.note(gone)
    one, other = first.told(), second.told()
    first.merge(other)
    second.merge(one)
    second.merge(one)
    for table in (first, second):
        assert table.find("red") is None
        assert table.unloaded("red")
        assert table.find("blue") == loaded
        assert [one.name for one in table.loaded()] == ["blue"]
    again = first.next("red", "/other")
    assert again.version > gone.version
    first.note(again)
    first.note(gone)
    assert first.find("red") == again, "the later one holds"
    assert not first.behind(gone)


def test_a_table_is_bounded() -> None:
    table = AdapterTable({"fixed": "/f"})
    for i in range(MAX_CHANGES):
        table.note(AdapterChange(str(i), "/x", 1 + i))
    assert table.full
    for i in range(3 * MAX_CHANGES):
        table.note(AdapterChange(str(i), "", 10_000 + i))
    assert not table.full
    assert len(table.told()) == MAX_CHANGES
    assert table.unloaded(str(3 * MAX_CHANGES - 1))


def ask(number: int, adapter: AdapterChange | None, avoid: tuple[str, ...] = ()) -> Ask:
    return Ask(number, "POST", "/v1/completions", [], b"{}", avoid=avoid, adapter=adapter)


def choice(*ids: str) -> Choice:
    made = Choice()
    made.set_up("prefix_aware", 1000)
    made.update(ids)
    return made


def test_requests_go_where_their_adapter_is_in_memory() -> None:
    one = choice(A, B, C)
    one.told(B, 1, 0, ["red"])
    one.told(C, 1, 0, ["blue"])
    assert {one.order(ask(n, RED), [A, B, C])[0] for n in range(6)} == {B}
    assert {one.order(ask(n, BLUE), [A, B, C])[0] for n in range(6)} == {C}
    assert len({one.order(ask(n, None), [A, B, C])[0] for n in range(6)}) == 3, (
        "the model itself is anywhere"
    )
    assert one.order(ask(9, RED, (B,)), [A, B, C])[0] != B, "who failed is not asked again"
    one.told(B, 2, 0, [])
    assert one.order(ask(10, AdapterChange("new", "/n")), [A, B])[0] in (A, B)


def test_an_adapter_that_nobody_has_goes_to_who_holds_the_fewest_and_stays_there() -> None:
    one = choice(A, B)
    one.told(A, 1, 0, ["red", "green"])
    one.told(B, 1, 0, ["red"])
    assert {one.order(ask(n, BLUE), [A, B])[0] for n in range(4)} == {B}
    one.began(ask(1, BLUE), B)
    assert one.multiplexed == {"in_memory": 0, "to_load": 1}
    one.began(ask(2, RED), A)
    assert {one.order(ask(n, BLUE), [A, B])[0] for n in range(3, 6)} == {B}, (
        "where it is being read"
    )
    one.ended(1)
    assert not one.replicas[B].holds("blue")
    assert one.replicas[B].wanted == {}


def test_a_busy_holder_is_relieved() -> None:
    one = choice(A, B)
    one.told(A, 1, 0, ["red"])
    for number in range(WORTH):
        one.began(ask(number, RED), A)
    assert one.order(ask(50, RED), [A, B])[0] == A
    one.began(ask(WORTH, RED), A)
    assert one.order(ask(51, RED), [A, B])[0] == B


class Broadcast:
    """What a handle's broadcast gives back."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        found = await asyncio.gather(*self._told, return_exceptions=True)
        return list(found)


class Handle:
    """Of a deployment with these replicas, asked in turn."""

    def __init__(self, name: str, replicas: list[Any]) -> None:
        self.choice, self.replicas = choice_of(name), replicas
        self.ids = [f"{name}-{i}" for i in range(len(replicas))]
        self.choice.update(self.ids)
        self.multiplexed: list[str] = []

    def options(self, **given: Any) -> Handle:
        self.multiplexed += (
            [given["multiplexed_model_id"]] if "multiplexed_model_id" in given else []
        )
        return self

    def remote(self, ask: Ask) -> Any:
        name = self.choice.order(ask, self.ids)[0]
        self.choice.began(ask, name)
        return self.replicas[self.ids.index(name)].answer(ask)

    def broadcast(self, method: str, *arguments: Any) -> Broadcast:
        return Broadcast([getattr(one, method)(*arguments) for one in self.replicas])


class Played:
    """A replica that says of changes what it is given, and notes what it was told."""

    def __init__(self, *said: Any) -> None:
        self.said, self.told = list(said), list[tuple[str, AdapterChange]]()

    async def change_adapter(self, ask: Ask, change: AdapterChange) -> Any:
        self.told.append(("change", change))
        if isinstance(self.said[0], Exception):
            raise self.said.pop(0)
        return self.said.pop(0)

    async def drop_adapter(self, change: AdapterChange) -> Any:
        self.told.append(("drop", change))
        return 200, b"", ""

    async def answer(self, ask: Ask) -> AsyncIterator[Any]:
        yield 200, [(b"content-type", b"application/json")]
        yield json.dumps({"object": "list", "data": [{"id": "m", "parent": None}]}).encode()


OK = (200, b"Success", "")
BAD = (400, b'{"error":{"reason":"adapter_unreadable"}}', "adapter_unreadable")
THERE = (400, b'{"error":{"reason":"adapter_exists"}}', "adapter_exists")
MISSING = (404, b'{"error":{"reason":"adapter_not_found"}}', "adapter_not_found")


def client_of(models: dict[str, Any], **handles: Any) -> httpx.AsyncClient:
    app: Any = Door(settings_of({"models": models}), handles).app()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize(
    ("said", "more", "status", "dropped"),
    [
        ([OK, OK], {}, 200, False),
        ([OK, RuntimeError("died")], {}, 200, False),
        ([OK, THERE], {}, 200, False),
        ([OK, BAD], {}, 400, True),
        ([OK, BAD], {"load_inplace": True}, 502, False),
        ([BAD, BAD], {}, 400, False),
        ([THERE, THERE], {}, 400, False),
        ([RuntimeError("died"), RuntimeError("died")], {}, 503, False),
    ],
)
async def test_a_load_is_at_all_replicas_or_at_none(
    said: list[Any],
    more: dict[str, Any],
    status: int,
    dropped: bool,
    request: pytest.FixtureRequest,
) -> None:

    replicas = [Played(one) for one in said]
    handle = Handle(request.node.name, replicas)
    async with client_of({"m": {"model": "m"}}, m=handle) as client:
        choice_of("m").adapters = AdapterTable()
        body = {"lora_name": "red", "lora_path": "/red", **more}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        models = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert answer.status_code == status, answer.text
    assert ("red" in models) == (status == 200)
    if status == 200:
        assert (models["red"]["parent"], models["red"]["root"]) == ("m", "/red")
    assert [any(how == "drop" for how, _ in one.told) for one in replicas] == [dropped, dropped]


async def test_an_unload_holds_where_some_did_not_know_it_and_new_replicas_do_not_bring_it_back() -> (
    None
):

    replicas = [Played(OK), Played(MISSING)]
    models = {"um": {"model": "m", "adapters": {"red": "/red"}}, "other": {"model": "n"}}
    handles = {"um": Handle("um", replicas), "other": Handle("other", [Played(BAD)])}
    async with client_of(models, **handles) as client:
        assert choice_of("um").adapters.find("red") is not None
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "red"})
        assert answer.status_code == 200
        assert choice_of("um").adapters.find("red") is None
        asked = await client.post("/v1/completions", json={"model": "red", "prompt": "x"})
        assert asked.json()["error"]["reason"] == "model_not_found"
        unsaid = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/n"}
        )
        assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "model")
        broken = await client.post("/v1/load_lora_adapter", content=b"{")
        assert broken.status_code == 400
        taken = await client.post(
            "/v1/load_lora_adapter",
            json={"lora_name": "um", "lora_path": "/n", "model": "other"},
        )
        assert taken.json()["error"]["reason"] == "adapter_exists"
    [(how, change)] = replicas[0].told
    assert (how, change.path) == ("change", "")


def replica(**adapters: Path) -> ModelReplica:
    engine = {"model": str(TINY), "threads": 1, "kv_cache_memory": 16 << 20, "max_loras": 1}
    lora = ",".join(f"{name}={path}" for name, path in adapters.items())
    server = {
        "served_model_name": "lora-tiny",
        "log_level": "error",
        "admin_key": "secret",
        "lora": lora,
    }
    return ModelReplica({"engine": engine, "server": server})


async def text(client: httpx.AsyncClient, model: str) -> str:
    body = {
        "model": model,
        "prompt": "the old house",
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def held(one: ModelReplica, *names: str) -> None:
    """Until its reports say that it has these in memory."""
    async with asyncio.timeout(60):
        while sorted((await one.record_routing_stats())["adapters"]) != sorted(names):
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_adapters_of_real_replicas(tmp_path: Path) -> None:
    spec = open_model(TINY)[1]
    red, blue = (
        write_adapter(tmp_path / name, spec, ALL, seed=i, size=1.0)
        for i, name in enumerate(("red", "blue"))
    )

    first = replica(red=red)
    late = replica(red=red)
    handle = Handle("lora-tiny", [first])
    settings = {"lora-tiny": {"model": "m", "adapters": {"red": str(red)}}}
    try:
        async with client_of(settings, **{"lora-tiny": handle}) as client:
            plain, in_red = await text(client, "lora-tiny"), await text(client, "red")
            await held(first, "red")
            body = {"lora_name": "blue", "lora_path": str(blue)}
            refused = await client.post("/v1/load_lora_adapter", json=body)
            assert refused.status_code in (401, 403)
            assert (await first.record_routing_stats())["changes"] == {}
            loaded = await client.post("/v1/load_lora_adapter", json=body, headers=KEY)
            assert loaded.status_code == 200, loaded.text
            in_blue = await text(client, "blue")
            assert len({plain, in_red, in_blue}) == 3
            await held(first, "blue")
            assert handle.multiplexed == ["red", "blue"]
            # another replica comes, and the first one goes: its first request has it loaded
            handle.replicas, handle.ids = [late], ["late"]
            handle.choice.update(["late"])
            answers = await asyncio.gather(
                *(text(client, name) for name in ("blue", "red", "blue"))
            )
            assert answers == [in_blue, in_red, in_blue]
            models = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
            assert {models[name]["parent"] for name in ("red", "blue")} == {"lora-tiny"}
            gone = await client.post(
                "/v1/unload_lora_adapter", json={"lora_name": "blue"}, headers=KEY
            )
            assert gone.status_code == 200
            body = {"model": "blue", "prompt": "x"}
            assert (await client.post("/v1/completions", json=body)).status_code == 404
            lost = handle.choice.adapters.next("lost", str(tmp_path / "nowhere"))
            handle.choice.adapters.note(lost)
            answer = await client.post("/v1/completions", json={"model": "lost", "prompt": "x"})
            assert answer.status_code == 503, "another replica may have it"
            assert answer.json()["error"]["reason"].startswith("adapter_")
    finally:
        await asyncio.gather(first.close(), late.close())
