"""The page of a router: its replicas, the batch of each, and where a stream moved."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pageturner.http import lifecycle
from pageturner.progress import Still
from pageturner.server.waiting_room import waiting_room
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


@contextmanager
def fetching(text: str) -> Iterator[str]:
    """The address of a server whose model is still fetched."""
    with lifecycle.bind("127.0.0.1", 0) as listener, waiting_room(listener), Still(lambda: text):
        yield lifecycle.url_of(listener)


def test_a_replica_that_fetches_its_model_says_how_far_it_is(start: Start) -> None:
    here = start().url
    with fetching("fetching org/story: 3 of 9 MB") as url:
        router = start(here, f"story={url}", "--health-interval", "0.1", command="route")

        def seen() -> dict[str, Any] | None:
            well, one = router.http.get("/v1/live").json()["replicas"]
            assert well["trouble"] == ""
            return one if one["trouble"] else None

        told = router.until(seen)
        assert told["models"] == ["story"]
        assert told["trouble"] == "the server starts: fetching org/story: 3 of 9 MB"


class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_model_that_is_still_fetched_is_in_the_list_with_how_far_it_is(
        self, start: Start, browse: Callable[..., Page]
    ) -> None:
        here = start()
        with fetching("fetching org/story: 3 of 9 MB") as url:
            urls = (f"fake={here.url}", f"story={url}")
            page = browse(start(*urls, "--health-interval", "0.1", command="route").url)
            page.until("!at('models').hidden && at('model').options.length === 2")
            last = "at('model').options[1]"
            assert page.js(f"{last}.disabled")
            page.until(f"{last}.textContent.endsWith(': fetching org/story: 3 of 9 MB')")
            assert "3 of 9 MB" in page.js("at('replicas').textContent")
            page.ask("hello", most=5)
            page.answered()
            assert len(page.said()) == 2

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
