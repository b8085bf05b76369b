"""The door before real replicas in this process: Serve's handles are played by a few lines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from pageturner.router.ray.choice import Ask, choice_of
from pageturner.router.ray.door import Door
from pageturner.router.ray.replica import ModelReplica
from pageturner.router.ray.settings import settings_of
from support.engines import GOLDENS

BODY = {
    "model": "tiny",
    "prompt": "Once upon",
    "max_tokens": 40,
    "stream": True,
    "seed": 7,
    "temperature": 0.8,
}
SETTINGS = {"models": {"tiny": {"model": "tiny.gguf", "adapters": {"pirate": "/adapters/pirate"}}}}


class Died(Exception):
    """As Ray says that an actor has died."""


class Pieces:
    """What a handle gives back."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._pieces = pieces
        self.cancelled = False

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._pieces)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Of a deployment with these replicas, which are asked in turn. lost_after: tokens behind which the first
    attempt is lost."""

    def __init__(self, name: str, replicas: list[Any], lost_after: int = 0) -> None:
        self.asked: list[tuple[str, Ask]] = []
        self.given: list[Pieces] = []
        self._choice, self._lost_after = choice_of(name), lost_after
        self._replicas = {f"{name}-{i}": one for i, one in enumerate(replicas)}
        self._choice.update(list(self._replicas))

    def options(self, **given: Any) -> Handle:
        known = {"method_name": "answer", "stream": True}
        assert given == known or list(given) == ["multiplexed_model_id"]
        return self

    def remote(self, ask: Ask) -> Pieces:
        name = self._choice.order(ask, list(self._replicas))[0]
        self._choice.began(ask, name)
        self.asked.append((name, ask))
        self.given.append(Pieces(self._of(name, ask)))
        return self.given[-1]

    async def _of(self, name: str, ask: Ask) -> AsyncIterator[Any]:
        body = b""
        async for piece in self._replicas[name].answer(ask):
            if not self._lost_after or not isinstance(piece, bytes):
                yield piece
                continue
            body += piece
            marks = [one.end() for one in re.finditer(rb":pt \d+\n\n", body)]
            if len(marks) >= self._lost_after:
                cut = marks[self._lost_after - 1] + 20  # in the middle of an event
                self._lost_after = 0
                yield body[:cut]
                raise Died("The actor died unexpectedly")


class Silly:
    """A replica that answers with what it is given."""

    def __init__(self, *pieces: Any) -> None:
        self._pieces = pieces

    async def answer(self, ask: Ask) -> AsyncIterator[Any]:
        for piece in self._pieces:
            await asyncio.sleep(0)
            if isinstance(piece, Exception):
                raise piece
            yield piece


def door_of(settings: dict[str, Any], **handles: Any) -> httpx.AsyncClient:
    app: Any = Door(settings_of(settings), handles).app()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def tiny() -> ModelReplica:
    model = str(GOLDENS / "tiny_llama.gguf")
    engine = {"model": model, "threads": 1, "kv_cache_memory": 16 << 20}
    return ModelReplica(
        {"engine": engine, "server": {"served_model_name": "tiny", "log_level": "error"}}
    )


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def text_of(body: str) -> str:
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1])


async def moves(replica: ModelReplica) -> None:
    """A stream that is lost goes on elsewhere, as if nothing had been. One engine plays two replicas."""
    whole = Handle("tiny", [replica, replica])
    async with door_of(SETTINGS, tiny=whole) as client:
        wanted = (await client.post("/v1/completions", json=BODY)).text
        models = (await client.get("/v1/models")).json()
    assert [one["id"] for one in models["data"]] == ["tiny"]
    lost = Handle("tiny", [replica, replica], lost_after=5)
    async with door_of(SETTINGS, tiny=lost) as client:
        answer = await client.post("/v1/completions", json=BODY)
        metrics = (await client.get("/metrics")).text
    assert text_of(answer.text) == text_of(wanted)
    assert ":pt" not in answer.text
    assert [ask.target for _, ask in lost.asked] == ["/v1/completions", "/v1/streams/resume"]
    (first, _), (second, resumed) = lost.asked
    assert first != second
    assert resumed.avoid == (first,)
    assert 'pageturner:router_moved_total{model="tiny"} 1.0' in metrics


async def leaves(replica: ModelReplica) -> None:
    """Nobody computes for a client that has left."""
    server = await replica.start()
    pieces = replica.answer(
        Ask(1, "POST", "/v1/completions", [], json.dumps(BODY | {"max_tokens": 1900}).encode())
    )
    await anext(pieces)
    await anext(pieces)
    assert server.service.active == 1
    assert (await replica.record_routing_stats())["active"] == 1
    assert (await replica.record_autoscaling_stats())["busy"] > 0
    await pieces.aclose()  # type: ignore[attr-defined]
    assert server.service.active == 0
    assert await replica.record_autoscaling_stats() == {
        "met": 0,
        "answers": 0,
        "open": 0,
        "busy": 0.0,
    }


def test_a_replica_with_its_engine() -> None:
    async def work() -> None:
        replica = tiny()
        try:
            await replica.check_health()
            await moves(replica)
            await leaves(replica)
        finally:
            await replica.close()

    run(work)


OK = (200, [(b"content-type", b"application/json")])


def test_a_replica_that_is_lost_before_its_answer_costs_nobody_an_error() -> None:
    async def work() -> None:
        handle = Handle("tiny", [Silly(Died("gone")), Silly(OK, b'{"a":1}')])
        async with door_of(SETTINGS, tiny=handle) as client:
            answers = [await client.post("/v1/completions", json={"prompt": "x"}) for _ in range(4)]
        assert [one.json() for one in answers] == [{"a": 1}] * 4
        assert handle._choice.attempts == {}

    run(work)


def test_all_are_lost() -> None:
    async def work() -> None:
        handle = Handle("tiny", [Silly(Died("gone")), Silly(Died("gone"))])
        async with door_of(SETTINGS, tiny=handle) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 502
            assert answer.json()["error"]["reason"] == "replica_lost"
            assert "Died: gone" in answer.json()["error"]["message"]
            assert (await client.get("/v1/models")).status_code == 503

    run(work)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [("story", "story"), ("code", "code"), ("pirate", "code"), (None, "story"), ("nobody", None)],
)
def test_the_model_chooses_the_fleet(asked: str | None, wanted: str | None) -> None:
    async def work() -> None:
        models = {"story": {"model": "a"}, "code": {"model": "b", "adapters": {"pirate": "/p"}}}
        handles = {name: Handle(name, [Silly(OK, name.encode())]) for name in models}
        async with door_of({"models": models}, **handles) as client:
            answer = await client.post("/v1/completions", json={"model": asked, "prompt": "x"})
            page = await client.get("/v1/models/code")
        assert page.text == "code"
        if wanted is None:
            assert answer.status_code == 404
            assert answer.json()["error"]["reason"] == "model_not_found"
        else:
            assert answer.text == wanted

    run(work)


def test_lists_of_models_are_one_list() -> None:
    async def work() -> None:
        def said(id: str) -> bytes:
            return json.dumps({"object": "list", "data": [{"id": id}]}).encode()

        handles = {
            "a": Handle("a", [Silly(OK, said("a"))]),
            "b": Handle("b", [Silly(OK, said("b"))]),
            "c": Handle("c", [Silly(Died("gone"))]),
        }
        models = {name: {"model": "m"} for name in handles}
        async with door_of({"models": models}, **handles) as client:
            listed = (await client.get("/v1/models")).json()
            assert [one["id"] for one in listed["data"]] == ["a", "b"]
            assert (await client.get("/ping")).status_code == 200
            assert (await client.get("/load")).json() == {"server_load": 0}
            assert (await client.get("/health")).json()["replicas"] == {"a": 1, "b": 1, "c": 1}
            assert (await client.get("/nowhere")).status_code == 404

    run(work)


def test_a_model_that_cannot_be_loaded_fails_its_health_check(tmp_path: Any) -> None:
    async def work() -> None:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF")
        replica = ModelReplica({"engine": {"model": str(broken)}, "server": {"log_level": "error"}})
        with pytest.raises(Exception, match=r"broken\.gguf"):
            await replica.check_health()
        await replica.close()

    run(work)
