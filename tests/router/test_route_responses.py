"""What a router passes on to one replica and no other: answers that it keeps; and a router's document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pageturner.http.http_client import ServerAddress
from pageturner.router.keepers import MAX_ID, by_id, tagged
from server.conftest import Server
from support.refusals import refusal_of

from .replica import Replica, routed, write
from .test_route import fleet, hangs_up


async def keeps(replica: Replica, writer: asyncio.StreamWriter) -> None:
    """Says under which id it would keep an answer."""
    asked = replica.asked[-1]
    write(writer, 200, {"by": replica.name, "id": "resp_" + asked.headers["x-request-id"]})


async def test_an_answer_is_found_where_it_is_kept() -> None:
    replicas = fleet(3, answer=keeps)
    async with routed(replicas) as there:
        for _ in range(6):
            made = (await there.http.post("/v1/responses", json={"input": "hi"})).json()
            for method, more in (
                ("GET", ""),
                ("GET", "/input_items"),
                ("POST", "/cancel"),
                ("DELETE", ""),
            ):
                found = await there.http.request(method, f"/v1/responses/{made['id']}{more}")
                assert found.json()["by"] == made["by"]
            body = {"input": "go on", "previous_response_id": made["id"]}
            assert (await there.http.post("/v1/responses", json=body)).json()["by"] == made["by"]
        lines = {asked.line for asked in replicas[0].asked}
        assert any(line.startswith("DELETE /v1/responses/resp_") for line in lines)
    assert all(replica.asked for replica in replicas)


async def test_what_nobody_keeps_is_told_at_once() -> None:
    replicas = fleet(2, answer=keeps)
    async with routed(replicas) as there:
        for id in ("resp_x", "resp_00000000-x", "5", "resp_" + "f" * 32):
            for refused in (
                await there.http.get(f"/v1/responses/{id}"),
                await there.http.post(
                    "/v1/responses", json={"input": "", "previous_response_id": id}
                ),
            ):
                assert refusal_of(refused) == (
                    404,
                    "response_not_found",
                )
        assert not any(replica.asked for replica in replicas)


async def test_one_that_is_gone_is_not_stood_in_for() -> None:
    replicas = fleet(2, answer=keeps)
    async with routed(replicas) as there:
        made = (await there.http.post("/v1/responses", json={"input": "hi"})).json()
        keeper = next(one for one in replicas if one.name == made["by"])
        keeper.health = 503
        while any(
            one.healthy
            for one in there.router.fleet.replicas
            if str(keeper.port) in str(one.address)
        ):
            await asyncio.sleep(0.01)
        refused = await there.http.get(f"/v1/responses/{made['id']}")
        assert refusal_of(refused) == (503, "no_replica")
        assert (await there.http.post("/v1/responses", json={"input": "hi"})).json()["by"] != made[
            "by"
        ]


async def test_what_goes_on_by_itself_is_not_begun_twice() -> None:
    replicas = fleet(3, answer=hangs_up)
    async with routed(replicas) as there:
        lost = await there.http.post("/v1/responses", json={"input": "hi", "background": True})
        assert (lost.status_code, sum(len(one.asked) for one in replicas)) == (502, 1)
        await there.http.post("/v1/responses", json={"input": "hi"})
        assert sum(len(one.asked) for one in replicas) > 2


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"previous_response_id": 5}', b'{"previous_response_id": "\\ud800"}']
)
async def test_whatever_is_wrong_a_replica_says(body: bytes) -> None:
    async with routed(fleet(1, answer=keeps)) as there:
        assert (await there.http.post("/v1/responses", content=body)).status_code == 200


def test_ids_fit() -> None:
    here, other = ServerAddress("a", 1), ServerAddress("b", 1)
    assert tagged("x", here) != tagged("x", other)
    assert tagged("x", here) == tagged("x", ServerAddress("a", 1))
    assert len(tagged("y" * MAX_ID, here)) == 128
    assert len(tagged("y" * 128, here)) < 128


async def test_its_document_is_that_of_a_replica_without_what_is_not_passed_on() -> None:
    operation = {"responses": {"200": {}, "500": {"content": {"x": 1}}}}
    paths = {
        path: {"get": operation, "post": operation}
        for path in (
            "/health",
            "/v1/completions",
            "/v1/models/{id}",
            "/v1/prefixes",
            "/v1/admin/state",
        )
    }

    async def documented(replica: Replica, writer: asyncio.StreamWriter) -> None:
        write(writer, 200, {"openapi": "3.1.0", "paths": paths})

    replicas = fleet(1, answer=documented)
    async with routed(replicas) as there:
        made = (await there.http.get("/openapi.json")).json()
        assert {path: set(methods) for path, methods in made["paths"].items()} == {
            "/health": {"get", "post"},
            "/v1/completions": {"post"},
            "/v1/models/{id}": {"get"},
        }
        assert made["paths"]["/v1/completions"]["post"]["responses"]["502"]["content"] == {"x": 1}
        await there.http.get("/openapi.json")
        assert len(replicas[0].asked) == 1
        assert (await there.http.get("/docs")).headers["content-security-policy"]
        replicas[0].answer = keeps
    async with routed(fleet(1, answer=keeps)) as there:
        assert (await there.http.get("/openapi.json")).status_code == 502


@pytest.mark.slow
def test_with_servers(start: Callable[..., Server]) -> None:
    servers = [start(), start()]
    router = start(*(server.url for server in servers), command="route")

    def ask(**body: Any) -> dict[str, Any]:
        answer = router.http.post("/v1/responses", json={"max_output_tokens": 5, **body})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    for _ in range(4):
        first = ask(input="hi")
        second = ask(input="and?", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert router.http.get(f"/v1/responses/{second['id']}").json() == second
        assert router.http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
        assert router.http.get(f"/v1/responses/{first['id']}").status_code == 404
    assert router.http.get("/v1/models/fake").json()["id"] == "fake"
    assert json.dumps(router.http.get("/openapi.json").json()).count("/v1/responses") > 3


async def test_a_stray_of_another_key_is_none() -> None:
    """Who gives the same X-Request-Id, and whose stream has moved, leads nobody to the wrong replica."""
    async with routed(fleet(2, answer=keeps)) as there:
        kept, other = there.router.fleet.replicas
        id = tagged("same", kept.address)
        there.router.fleet.kept_elsewhere(id, b"other", other)
        assert by_id(there.router.fleet, b"", f"resp_{id}", b"mine").only is kept
        assert by_id(there.router.fleet, b"", f"resp_{id}", b"other").only is other
