"""`/v1/admin/config` over HTTP: who may, what may be said, and that it outlives the engine process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import Server
from .test_http import post

Start = Callable[..., Server]
KEY = "a-secret-of-the-house"
BEGIN = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "policy": "chunked", "order": "fcfs"}


def change(server: Server, body: Any, key: str = KEY) -> httpx.Response:
    return server.http.post(
        "/v1/admin/config", json=body, headers={"authorization": f"Bearer {key}"}
    )


def present(server: Server) -> Any:
    answer = server.http.get("/v1/admin/config", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    return answer.json()


def test_without_an_admin_key_there_is_nothing(start: Start) -> None:
    server = start("--api-key", "client-key")
    assert change(server, {}).status_code == 404
    assert change(server, {}, "none").status_code == 404
    assert server.http.get("/v1/admin/config").status_code == 404
    assert server.http.get("/v1/admin/state").status_code == 404


def test_who_may_change_what(start: Start) -> None:
    server = start("--api-key", "client-key", PAGETURNER_ADMIN_KEY=KEY)
    assert present(server) == BEGIN | {"applied": True}
    for key in ("client-key", "none", KEY[:-1], KEY + "x"):
        refused = change(server, {"policy": "orca"}, key)
        assert refused.status_code == 403
        assert refused.json()["error"]["reason"] == "invalid_admin_key"
    bad: list[tuple[Any, str | None, str]] = [
        ({"policy": "nonsense"}, "policy", "chunked"),
        ({"order": "nonsense"}, "order", "fcfs"),
        ({"order": 7}, "order", "str"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1 or more"),
        ({"max_num_seqs": True}, "max_num_seqs", "int"),
        ({"max_num_seqs": "64"}, "max_num_seqs", "int"),
        ({"max_num_seqs": 1 << 30}, "max_num_seqs", "or less"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens", "0 or more"),
        ({"policy": "orca", "block_size": 8}, "block_size", "what can be changed"),
        ([1], None, "JSON object"),
    ]
    for body, field, told in bad:
        refused = change(server, body)
        assert refused.status_code == 400, body
        assert told in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == field
    assert present(server) == BEGIN | {"applied": True}
    assert not server.notes("configure")
    assert KEY not in server.log


def test_a_change_is_told_and_outlives_the_engine(start: Start) -> None:
    server = start("--admin-key", KEY)
    wide = {"use_beam_search": True, "n": 8, "max_tokens": 2}
    answer = change(server, {"policy": "orca", "max_num_seqs": 4})
    assert answer.status_code == 200
    wanted = BEGIN | {"policy": "orca", "max_num_seqs": 4}
    assert {name: answer.json()[name] for name in BEGIN} == wanted
    server.until(lambda: present(server) == wanted | {"applied": True})
    assert post(server, **wide).status_code == 400, "a search wider than what runs now"
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: len(server.notes("configure")) == 2)
    told = [note["configure"] for note in server.notes("configure")]
    assert told[0] == told[1]
    assert told[1].items() >= (wanted | {"widest": 64}).items()
    server.until(lambda: present(server) == wanted | {"applied": True})
    change(server, {"max_num_seqs": 100})
    server.until(lambda: len(server.notes("configure")) == 3)
    assert server.notes("configure")[-1]["configure"]["widest"] == 100
    assert server.notes("configure")[-1]["configure"]["policy"] == "orca"


@pytest.mark.parametrize("path", ["/v1/admin", "/v1/admin/other"])
def test_the_door_is_open_for_nothing_else(start: Start, path: str) -> None:
    server = start("--api-key", "client-key", "--admin-key", KEY)
    assert server.http.get(path).status_code in (401, 404)
    assert server.http.get("/v1/models").status_code == 401
