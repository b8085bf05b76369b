"""The page of a router: its replicas, the batch of each, and where a stream moved."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from server.conftest import Server
from server.test_http import events
from support.browser import Page, browse, in_a_browser

__all__ = ["browse"]
Start = Callable[..., Server]


def fleet(start: Start, *flags: str) -> tuple[list[Server], Server]:
    servers = [start(*flags, FAKE_STEP_SECONDS="0.02") for _ in range(2)]
    urls = [server.url for server in servers]
    return servers, start(*urls, "--health-interval", "0.1", command="route")


def move_a_stream(servers: list[Server], router: Server) -> None:
    """Kill the server that answers."""

    def running(server: Server) -> bool:
        return server.metric("vllm:num_requests_running") > 0

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(events, router, prompt="story", max_tokens=80)
        lost = router.until(lambda: next(filter(running, servers), None))
        time.sleep(0.2)  # a few tokens
        lost.process.send_signal(signal.SIGKILL)
        assert answer.result(60)


def test_a_router_tells_its_replicas_the_batch_of_each_and_the_moves(start: Start) -> None:
    servers, router = fleet(start)
    page = router.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "A router has no such settings" in page.text
    seen = router.http.get("/v1/live").json()
    assert [one["address"] for one in seen["replicas"]] == [one.url for one in servers]
    assert [one["healthy"] for one in seen["replicas"]] == [True, True]
    assert seen["moves"] == []
    move_a_stream(servers, router)
    seen = router.http.get("/v1/live").json()
    (move,) = seen["moves"]
    assert {move["from"], move["to"]} == {one.url for one in servers}
    assert move["tokens"] >= 1
    query = {"replica": move["to"], "since": "0"}
    assert "blocks_total" in router.http.get("/v1/live", params=query).json()["figures"]
    assert router.http.get("/v1/live", params=query | {"replica": move["from"]}).status_code == 502
    for bad in ({"replica": "http://127.0.0.1:1"}, {"since": "x"}, {"since": "1 HTTP/1.1"}):
        assert router.http.get("/v1/live", params=query | bad).status_code == 400


def test_the_view_of_a_replica_asks_for_its_own_key(start: Start) -> None:
    servers, router = fleet(start, "--admin-key", "a")
    query = {"replica": servers[0].url}
    assert router.http.get("/v1/live", params=query).status_code == 403
    headers = {"authorization": "Bearer a"}
    assert router.http.get("/v1/live", params=query, headers=headers).status_code == 200


class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_person_sees_the_fleet_and_where_a_stream_moved(
        self, start: Start, browse: Callable[..., Page]
    ) -> None:
        servers, router = fleet(start)
        page = browse(router.url)
        page.until("document.querySelectorAll('.replica canvas').length === 2")
        page.ask("hello", most=20)
        page.answered()
        assert len(page.said()[1]) > 10
        tiles = "[...document.querySelectorAll('#figures div')].map((one) => one.textContent)"
        page.until("[...fleet.views.values()].some((view) => view.batch.steps.length)")
        assert "Replicas2 of 2" in page.js(tiles)
        move_a_stream(servers, router)
        page.until("at('moves').textContent.includes('from http')")
        page.until("document.querySelectorAll('.replica.gone').length === 1")
        assert "does not answer" in page.js("document.querySelector('.gone').textContent")
        assert "Streams moved1" in page.js(tiles)
        assert page.js("at('single').hidden")
