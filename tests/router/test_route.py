"""A router before replicas that do as they are told: whom it asks, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from pageturner.config.settings import RouterConfig
from pageturner.http.http_client import ServerAddress, parse_address
from pageturner.http.receiving import canonical_path
from pageturner.router.documents import OWN
from pageturner.router.load_balancer import PLACEMENTS
from pageturner.router.request_hints import CHUNK, MAX_CHUNKS, prefix_digests
from pageturner.server.api.openapi.operations import OPERATIONS
from support.refusals import engine_fault, refusal_of

from .replica import Replica, begin_stream, chunk, routed, whole, write

STORY, TALE = "Once upon a time. " * 40, "Long ago, far away. " * 40


def fleet(count: int = 2, **more: Any) -> list[Replica]:
    return [Replica("abcdef"[i], **more) for i in range(count)]


async def refuses(replica: Replica, writer: asyncio.StreamWriter) -> None:
    write(writer, 429, {"by": replica.name}, "Retry-After: 7")


async def hangs_up(replica: Replica, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")


async def never(replica: Replica, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def streams(replica: Replica, writer: asyncio.StreamWriter) -> None:
    begin_stream(writer)
    for i in range(60):
        chunk(writer, b'data: {"by":"%b","i":%d}\n\n' % (replica.name.encode(), i))
        await writer.drain()
        await asyncio.sleep(0.005)
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


# what concerns one server alone: whoever asks for it asks that server
OF_ONE_SERVER = [
    "/v1/files",
    "/v1/batches",
    "/v1/sessions",
    "/v1/prefixes",
    "/v1/requests",
    "/v1/admin",
    "/v1/streams",
    "/v1/live",
    "/slots",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/server_info",
    "/v1/responses/{id}",
]


async def test_every_path_of_a_model_is_passed_on() -> None:
    async with routed(replicas := fleet(1)) as there:
        for operation in OPERATIONS:
            if operation.path in (*OWN, "/") or operation.path.startswith(tuple(OF_ONE_SERVER)):
                continue
            path = operation.path.replace("{id}", "a")
            for asked in dict.fromkeys((path, f"{path}/", path.removeprefix("/v1"))):
                if canonical_path(asked) != path:
                    continue  # of paths that have a version everywhere
                replicas[0].asked.clear()
                await there.http.request(
                    operation.method, asked, json={"model": "a", "prompt": STORY}
                )
                assert [one.line for one in replicas[0].asked] == [
                    f"{operation.method} {path} HTTP/1.1"
                ]


async def test_a_conversation_is_one_under_any_name_of_its_path() -> None:
    async with routed(fleet(3)) as there:
        paths = ("/v1/completions", "/completions", "/completions/")
        said = [await there.http.post(path, json={"prompt": STORY}) for path in paths]
        assert [one.json()["by"] for one in said] == ["a", "a", "a"]


# -- whom it asks --------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_where_it_began() -> None:
    async with routed(fleet(3)) as there:
        first = [{"role": "user", "content": STORY}]
        then = [
            *first,
            {"role": "assistant", "content": "The end."},
            {"role": "user", "content": "And then?"},
        ]

        async def chat(messages: list[dict[str, str]], key: str = "one") -> str:
            headers = {"authorization": f"Bearer {key}"}
            body = {"messages": messages}
            response = await there.http.post("/v1/chat/completions", json=body, headers=headers)
            return str(response.json()["by"])

        places = [
            await chat(first),
            await there.by(TALE),
            await chat(then),
            await there.by(TALE + "!"),
        ]
        assert places == ["a", "b", "a", "b"]
        assert await chat(then, "two") == "c", "another client's caches are none of its own"
        assert await there.metric('pageturner:router_placed_total{how="where_known"}') == 2
        assert await there.metric('pageturner:router_placed_total{how="nothing_known"}') == 3


async def test_a_replica_that_was_gone_has_forgotten() -> None:
    replicas = fleet(2)
    async with routed(replicas) as there:
        assert [await there.by(STORY) for _ in range(2)] == ["a", "a"]
        replicas[0].health = 503
        await there.until(lambda: not there.router.fleet.replicas[0].healthy)
        assert await there.by(STORY) == "b"
        replicas[0].health = 200
        await there.until(lambda: there.router.fleet.replicas[0].healthy)
        assert await there.by(STORY) == "b"


async def test_round_robin_and_short_prompts_go_round() -> None:
    async with routed(fleet(3), placement="round_robin") as there:
        assert [await there.by(STORY) for _ in range(4)] == ["a", "b", "c", "a"]
    async with routed(fleet(2)) as there:
        assert [await there.by("hi") for _ in range(4)] == ["a", "b", "a", "b"]


async def test_what_others_ask_of_a_replica_counts_as_load() -> None:
    replicas = fleet(3)
    replicas[0].load, replicas[1].load = 5, 2
    async with routed(replicas, placement="least_loaded") as there:
        assert [await there.by() for _ in range(3)] == ["c"] * 3
        replicas[0].load, replicas[2].load = 0, 9
        await there.until(lambda: [one.others for one in there.router.fleet.replicas] == [0, 2, 9])
        assert await there.by() == "a"


def test_digests_of_beginnings() -> None:
    def of(content: Any, whose: bytes = b"", **more: Any) -> tuple[bytes, ...]:
        return prefix_digests(json.dumps({"prompt": content, **more}).encode(), whose)

    assert len(of("x" * 3 * CHUNK)) == 3
    assert of("x" * 600)[:2] == of("x" * 599 + "y" * 600)[:2]
    assert of("x" * 600)[0] != of("y" + "x" * 600)[0]
    assert of("x" * 600)[0] != of("x" * 600, b"Bearer k")[0]
    assert of("x" * 600)[0] != of("x" * 600, cache_salt="s")[0]
    assert (
        len({of("x" * 600, model=name)[0] for name in ("the-model", "an-adapter", "another")}) == 3
    )
    assert of("x" * 600, model="an-adapter")[:2] == of("x" * 599 + "y" * 9, model="an-adapter")[:2]
    assert of(list(range(1000)))[:5] == of([*range(999), 7])[:5]
    assert len(of("x" * 2 * CHUNK * MAX_CHUNKS)) == MAX_CHUNKS
    assert of("short") == prefix_digests(b"[1]", b"") == prefix_digests(b'{"prompt": "', b"") == ()


# -- what fails before the first byte ------------------------------------------------------------------------


@pytest.mark.parametrize("way", [refuses, hangs_up])
async def test_another_replica_answers(way: Any) -> None:
    replicas = [Replica("a", way), Replica("b")]
    async with routed(replicas) as there:
        assert await there.by(STORY) == "b"
        assert len(replicas[0].asked) == 1
        assert await there.metric("pageturner:router_retries_total") == 1


async def test_a_replica_that_is_gone_is_skipped_and_comes_back() -> None:
    replicas = fleet(2)
    async with routed(replicas, health_interval=3600, placement="round_robin") as there:
        await replicas[0].stop()
        assert await there.by() == "b"
        await there.until(lambda: not there.router.fleet.replicas[0].healthy)
        assert [await there.by() for _ in range(2)] == ["b", "b"]
        assert await there.metric('pageturner:router_losses_total{reason="connect"') == 1
        await replicas[0].start()
        there.router.fleet.replicas[0].check_now.set()
        await there.until(lambda: there.router.fleet.replicas[0].healthy)
        assert {await there.by() for _ in range(2)} == {"a", "b"}


async def test_a_request_that_waits_at_a_silent_replica_goes_to_another() -> None:
    replicas = [Replica("a", never), Replica("b")]
    async with routed(replicas) as there:
        asked = asyncio.ensure_future(there.by())
        await there.until(lambda: replicas[0].asked)
        replicas[0].health = 0
        assert await asked == "b"


async def test_one_that_drains_keeps_what_it_has() -> None:
    replicas = [Replica("a", streams), Replica("b")]
    async with (
        routed(replicas) as there,
        there.http.stream("POST", "/v1/completions", json={}) as answer,
    ):
        pieces = answer.aiter_bytes()
        text = await anext(pieces)
        replicas[0].health = 503
        await there.until(lambda: not there.router.fleet.replicas[0].healthy)
        assert await there.by() == "b"
        text += b"".join([piece async for piece in pieces])
        assert text.count(b"data: {") == 60
        assert text.endswith(b"data: [DONE]\n\n")


async def test_refusals_and_their_retry_after_are_passed_on_when_all_refuse() -> None:
    replicas = fleet(3, answer=refuses)
    async with routed(replicas, retries=1) as there:
        response = await there.ask()
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        by = [replica.name for replica in replicas if replica.asked]
        assert len(by) == 2
        assert response.json()["by"] in by


async def test_a_request_that_breaks_every_replica_meets_few_of_them() -> None:
    replicas = fleet(5, answer=hangs_up)
    async with routed(replicas, retries=2, health_interval=3600) as there:
        response = await there.ask()
        assert refusal_of(response) == (502, "replica_lost")
        assert sum(len(replica.asked) for replica in replicas) == 3


async def test_nobody_there() -> None:
    replicas = fleet(2, health=503)
    async with routed(replicas) as there:
        response = await there.ask()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["reason"] == "no_replica"
        assert (await there.http.get("/health")).status_code == 503
        assert (await there.http.get("/ping")).status_code == 200
        replicas[1].health = 200
        await there.until(lambda: there.router.fleet.replicas[1].healthy)
        assert (await there.http.get("/health")).json() == {
            "status": "ok",
            "healthy": 1,
            "replicas": 2,
        }
        assert await there.by() == "b"


async def test_silence_ends_in_504() -> None:
    replicas = fleet(2, answer=never)
    async with routed(replicas, read_timeout=0.1) as there:
        response = await there.ask()
        assert refusal_of(response) == (504, "replica_silent")
        assert sum(len(replica.asked) for replica in replicas) == 1


# -- what fails later ----------------------------------------------------------------------------------------


async def test_streams_of_a_dead_replica_end_with_an_error_and_those_of_others_live_on() -> None:
    replicas = fleet(2, answer=streams)
    async with routed(replicas) as there:

        async def read() -> bytes:
            async with there.http.stream("POST", "/v1/completions", json={}) as answer:
                return b"".join([piece async for piece in answer.aiter_bytes()])

        texts = [asyncio.ensure_future(read()) for _ in range(6)]
        await there.until(lambda: all(len(replica.asked) == 3 for replica in replicas))
        await asyncio.sleep(0.05)
        await replicas[0].stop()
        done = [await text for text in texts]
        broken = [text for text in done if b"replica_lost" in text]
        assert len(broken) == 3
        for text in done:
            assert text.endswith(b"data: [DONE]\n\n")
            assert text in broken or text.count(b'"by":"b"') == 60
        last = broken[0].split(b"\n\n")[-3].removeprefix(b"data: ")
        assert json.loads(last)["error"]["code"] == 502
        assert await there.metric("pageturner:router_cut_total") == 3


async def test_lines_of_a_dead_replica_end_with_an_error_as_a_line() -> None:
    async def lines(replica: Replica, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head)
        chunk(writer, b'{"response":"a","done":false}\n')
        chunk(writer, b'{"respon')
        await writer.drain()

    async with routed([Replica("a", lines)]) as there:
        answer = await there.http.post("/api/generate", json={})
    *_, cut, last = answer.text.splitlines()
    assert cut == '{"respon'
    assert json.loads(last)["reason"] == "replica_lost"


async def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def half(replica: Replica, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
        await writer.drain()

    async with routed([Replica("a", half), Replica("b")]) as there:
        with pytest.raises(httpx.RemoteProtocolError):
            await there.ask()


async def test_a_client_that_leaves_frees_its_replica() -> None:
    replicas = [Replica("a", streams), Replica("b", never)]
    async with routed(replicas) as there:
        async with there.http.stream("POST", "/v1/completions", json={}) as answer:
            await anext(answer.aiter_bytes())
        await there.until(lambda: replicas[0].left == 1)
        with pytest.raises(httpx.ReadTimeout):
            await there.http.post("/v1/completions", json={}, timeout=0.2)
        await there.until(lambda: replicas[1].left == 1)
        await there.until(lambda: there.router.active == 0)
        assert [replica.open for replica in there.router.fleet.replicas] == [0, 0]


async def test_a_client_that_does_not_read_slows_its_replica() -> None:
    written = 0

    async def pours(replica: Replica, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        begin_stream(writer)
        while True:
            chunk(writer, bytes(1 << 16))
            await writer.drain()
            written += 1 << 16

    async with (
        routed([Replica("a", pours)]) as there,
        there.http.stream("POST", "/v1/completions", json={}) as answer,
    ):
        await anext(answer.aiter_bytes())
        before = -1
        async with asyncio.timeout(30):
            while before != written:
                before = written
                await asyncio.sleep(0.3)
        assert 0 < written < 100 << 20


# -- what it passes on, and what it refuses itself -----------------------------------------------------------


async def test_headers_and_bodies_arrive_as_they_were_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "pageturner")
    replicas = fleet(1)
    async with routed(replicas) as there:
        headers = {
            "authorization": "Bearer sesame",
            "x-request-id": "mine",
            "x-tenant": "acme",
            "x-deadline-ms": "9000",
            "x-ttft-target-ms": "8000",
            "connection": "x-hop",
            "x-hop": "1",
            "te": "trailers",
        }
        body = b'{"prompt": "\xc3\xa4", "unknown": [1.50]} '
        response = await there.http.post("/v1/completions?a=b%20c", content=body, headers=headers)
        asked = replicas[0].asked[0]
        assert asked.line == "POST /v1/completions?a=b%20c HTTP/1.1"
        assert asked.body == body
        got = asked.headers
        assert (got["authorization"], got["x-request-id"], got["x-tenant"]) == (
            "bearer sesame",
            "mine",
            "acme",
        )
        assert {"x-hop", "te"} & got.keys() == set()
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert len(response.headers.get_list("date")) == 1
    assert "mine POST" in caplog.text
    assert "sesame" not in caplog.text


async def test_answers_without_a_length_end_with_their_connection() -> None:
    async def old(replica: Replica, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(3):
            writer.write(b"piece ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with routed([Replica("a", old)]) as there:
        assert (await there.ask()).text == "piece piece piece "


async def test_a_stream_of_another_shape_ends_in_its_own_words() -> None:
    async def breaks(replica: Replica, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        chunk(writer, b'event: ping\ndata: {"type": "ping"}\n\n')
        await writer.drain()

    async with routed(fleet(1, answer=breaks)) as there:
        told = (await there.http.post("/v1/messages", json={})).text.split("\n\n")
        assert told[1].startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
        assert len(told) == 3


async def test_other_paths() -> None:
    replicas = fleet(2)
    async with routed(replicas) as there:
        assert (await there.http.get("/v1/models")).json() == {"by": "a"}
        assert (await there.http.post("/tokenize", json={"prompt": "x"})).json() == {"by": "b"}
        head = await there.http.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        for path in ("/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate"):
            assert (await there.http.post(path, json={})).status_code == 200
        for method, path, status in (
            ("GET", "/v1/prefixes", 404),
            ("GET", "/v1/responses", 405),
            ("GET", "/v1/responses/resp_nobody", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/admin/config", 404),
        ):
            refused = await there.http.request(method, path)
            assert refused.status_code == status, path
            assert refused.json()["error"]["code"] == status
        assert sum(len(replica.asked) for replica in replicas) == 7


async def test_bounds_of_requests_and_bodies() -> None:
    replicas = fleet(1, answer=never)
    async with routed(replicas, max_open=2, max_body_size=100) as there:
        waiting = [asyncio.ensure_future(there.ask()) for _ in range(2)]
        await there.until(lambda: len(replicas[0].asked) == 2)
        refused = await there.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["reason"] == "queue_full"
        assert (await there.ask("x" * 200)).status_code == 413
        for task in waiting:
            task.cancel()
        await there.until(lambda: there.router.active == 0)
        replicas[0].answer = whole
        assert await there.by() == "a"
        there.router.draining = True
        assert (await there.ask()).json()["error"]["reason"] == "shutting_down"
        assert (await there.http.get("/health")).status_code == 503


# -- addresses and settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu1:8000", ServerAddress("gpu1", 8000)),
        ("10.0.0.1:9/", ServerAddress("10.0.0.1", 9)),
        ("http://[::1]:8000/v1", ServerAddress("::1", 8000)),
        ("http://host/models/a/v1", ServerAddress("host", 80, "/models/a")),
        ("https://host", ServerAddress("host", 443)),
    ],
)
def test_addresses(url: str, address: ServerAddress) -> None:
    assert parse_address(url, "a replica") == address
    assert parse_address(str(address), "a replica") == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "host:0",
        "host:99999",
        "host:x",
        "ftp://host",
        "http://a:b@host",
        "http://host?x=1",
        "http://host/a b",
        "http://h\u00f6st:1",
        "http://host/\x7f",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with engine_fault("a replica is given as http://HOST:PORT"):
        parse_address(url, "a replica")


def test_every_placement_can_be_chosen() -> None:
    choices = RouterConfig.__dataclass_fields__["placement"].metadata["choices"]
    assert sorted(choices) == sorted(PLACEMENTS)


async def test_the_router_judges_the_origin_of_a_page_and_does_not_pass_it_on() -> None:
    replica = Replica("a")
    async with routed([replica]) as here:
        answer = await here.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"origin": "https://page.example"}
        )
        assert answer.status_code == 200
        assert "origin" not in replica.asked[0].headers
