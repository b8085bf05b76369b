"""`pageturner route` as a process, before real servers with the fake engine, one of which is killed."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pageturner import cli
from pageturner.router.route import MAX_FILES, raise_file_limit
from server.bytes_tokenizer import answer
from server.conftest import Server
from server.test_http import events, text_of


def test_a_replica_that_is_not_there_at_the_start_is_named(start: Callable[..., Server]) -> None:
    router = start("http://127.0.0.1:9", command="route")
    assert "0 of 1 replicas are up" in router.log
    assert "replica http://127.0.0.1:9 does not answer yet" in router.log


def test_streams_go_on_elsewhere_when_their_server_is_killed(start: Callable[..., Server]) -> None:
    servers = [start(FAKE_STEP_SECONDS="0.01") for _ in range(2)]
    router = start(*(server.url for server in servers), "--health-interval", "0.1", command="route")
    assert "2 of 2 replicas are up" in router.log
    prompts = [f"story {i}" for i in range(6)]

    def stream(prompt: str) -> list[dict[str, object]]:
        return events(router, prompt=prompt, max_tokens=100)

    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(stream, prompt) for prompt in prompts]
        router.until(lambda: [len(server.notes("submit")) for server in servers] == [3, 3])
        servers[0].until(lambda: servers[0].metric("vllm:generation_tokens_total") >= 9)
        servers[0].process.send_signal(signal.SIGKILL)
        told = [future.result(60) for future in running]
    for prompt, chunks in zip(prompts, told, strict=True):
        assert text_of(chunks) == answer(prompt, 100)
    assert router.metric("pageturner:router_moved_total") == 3
    assert router.metric("pageturner:router_cut_total") == 0
    router.until(lambda: "is down" in router.log)
    assert text_of(stream("one more")) == answer("one more", 100)
    assert router.stop() == 0
    assert "answers cut off: 0" in router.finished()


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), 4096),
        ((1024, resource.RLIM_INFINITY), MAX_FILES),
        ((1024, 1 << 20), MAX_FILES),
        ((1 << 20, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_router_may_open_as_many_files_as_it_is_let(
    limits: tuple[int, int], wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: asked.append(both))
    raise_file_limit()
    assert asked == ([] if wanted is None else [(wanted, limits[1])])


def test_what_is_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["ftp://host:1"], "a replica is given as http://HOST:PORT, not 'ftp://host:1'"),
        (["host:1", "http://host:1/v1"], "http://host:1 is there twice"),
        (
            ["host:1", "--placement", "best"],
            "placement is one of round_robin, least_loaded, prefix_aware",
        ),
        (["host:1", "--retries", "-1"], "retries is 0 or more, not -1"),
    ):
        assert cli.main(["route", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
