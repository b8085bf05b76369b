"""Whatever a server keeps by a name that a client chooses, it keeps for that client's tenant.

STORES lists every such store. What is not in it keeps nothing by a client's name: receipts are part of their
answer, a stream that moves brings all that it needs, adapters are the operator's, and there are no idempotency keys.
tests/server/test_history.py shows the same of timelines, test_keys.py of cached KV, which has no names to ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server, _end

ID = "the-same-id"
TEXT = "/v1/completions"


@dataclass(frozen=True)
class Store:
    """make: has something kept under ID, or an id of the server's own, and returns its id; paths: methods and
    paths by which it is found, changed or taken away."""

    make: Callable[[httpx.Client], str]
    paths: tuple[str, ...]


def made(path: str, field: str = "id", headers: dict[str, str] | None = None, **body: Any) -> Any:
    def make(client: httpx.Client) -> str:
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()[field])

    return make


def file_of(client: httpx.Client) -> str:
    line = (
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"<|stall|>"}}\n'
    )
    answer = client.post("/v1/files", files={"file": ("a", line)}, data={"purpose": "batch"})
    return str(answer.json()["id"])


def batch_of(client: httpx.Client) -> str:
    return str(made("/v1/batches", input_file_id=file_of(client), endpoint=TEXT)(client))


def session_of(client: httpx.Client) -> str:
    made(TEXT, prompt="hello", session=ID)(client)
    return ID


NAMED = {"x-request-id": ID}
STORES = {
    "stored responses": Store(
        made("/v1/responses", headers=NAMED, input="hello"),
        ("GET /v1/responses/{}", "GET /v1/responses/{}/input_items", "DELETE /v1/responses/{}"),
    ),
    "responses in the background": Store(
        made("/v1/responses", headers=NAMED, input="<|stall|>", background=True),
        ("GET /v1/responses/{}", "POST /v1/responses/{}/cancel"),
    ),
    "sessions": Store(session_of, ("GET /v1/sessions/{}", "DELETE /v1/sessions/{}")),
    "prefixes": Store(made("/v1/prefixes", id=ID, prompt="hello"), ("DELETE /v1/prefixes/{}",)),
    "files": Store(
        file_of, ("GET /v1/files/{}", "GET /v1/files/{}/content", "DELETE /v1/files/{}")
    ),
    "batches": Store(batch_of, ("GET /v1/batches/{}", "POST /v1/batches/{}/cancel")),
}


@pytest.fixture(scope="module")
def tenants(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of two tenants of one server."""
    folder: Path = tmp_path_factory.mktemp("tenants")
    server = Server(folder, ["--api-key", "a:one,b:two", "--batch-dir", f"{folder}/kept"], {}, True)
    clients = [
        httpx.Client(
            base_url=server.url,
            timeout=60,
            trust_env=False,
            headers={"authorization": f"Bearer {key}"},
        )
        for key in ("one", "two")
    ]
    yield clients[0], clients[1]
    for client in clients:
        client.close()
    _end(server)


def asked(client: httpx.Client, path: str, id: str) -> tuple[int, str]:
    """What is answered, without the id."""
    method, url = path.format(id).split()
    answer = client.request(method, url)
    return answer.status_code, answer.text.replace(id, "ID")


@pytest.mark.parametrize("name", STORES)
def test_a_name_of_another_tenant_is_none(
    tenants: tuple[httpx.Client, httpx.Client], name: str
) -> None:
    owner, other = tenants
    store = STORES[name]
    id = store.make(owner)
    absent = f"{id[:4]}0{id[5:]}"  # of the same form and length
    for path in store.paths:
        told = asked(other, path, id)
        assert told == asked(other, path, absent)
        assert told[0] == 404
    if id == ID or id.endswith(ID):
        assert store.make(other) == id
        for path in store.paths:  # each takes away its own alone
            assert asked(other, path, id)[0] == 200
    for path in store.paths:
        assert asked(owner, path, id)[0] == 200, path


def test_ids_of_others_in_a_body_are_none(tenants: tuple[httpx.Client, httpx.Client]) -> None:
    owner, other = tenants
    response = made(
        "/v1/responses", headers={"x-request-id": "first"}, input="hi", max_output_tokens=3
    )(owner)
    file = file_of(owner)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "on", "previous_response_id": response, "max_output_tokens": 3},
        "/v1/batches": {"input_file_id": file, "endpoint": TEXT},
    }
    for path, body in bodies.items():
        refused = other.post(path, json=body)
        assert refused.status_code in (400, 404), path
        name = response if path == "/v1/responses" else file
        unknown = {key: f"{name[:-1]}z" if value == name else value for key, value in body.items()}
        expected = other.post(path, json=unknown).text.replace(f"{name[:-1]}z", name)
        assert refused.text == expected
        answer = owner.post(path, json=body)
        assert answer.status_code == 200, answer.text
    made(TEXT, prompt="hello", session="forked")(owner)
    forked = {"prompt": "hello", "session": {"id": "mine", "fork_of": "forked"}}
    assert other.post(TEXT, json=forked).status_code == 200, "as a session that never was"
    assert other.get("/v1/sessions").json()["data"][-1]["id"] == "mine"
