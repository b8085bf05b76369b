"""The document of the API: every route is in it, and real answers are what it says."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route

from pageturner.config.settings import ServerConfig
from pageturner.http import web_pages
from pageturner.server.api.openapi.openapi import document
from pageturner.server.api.openapi.operations import OPERATIONS, ApiOperation
from pageturner.server.app import create_app
from support.json_schemas import Validator

from .conftest import Server
from .test_openai import HI, SERVED

DOCUMENT, OPEN = document(SERVED, keyed=True), document(SERVED, keyed=False)


def routes() -> set[tuple[str, str]]:
    """Method and path of every route of a server, without those that only answer for others."""
    app = create_app(MagicMock(config=ServerConfig()))
    found = [
        route
        for route in app.routes
        if isinstance(route, Route) and not route.path[1:].endswith("/")
    ]
    return {
        (method, route.path.replace(":path}", "}"))
        for route in found
        for method in (route.methods or _methods_of(route)) - {"HEAD"}
    }


def _methods_of(route: Route) -> set[str]:
    """Of a route that takes every method: what it says that nobody else does is no operation."""
    return set()


def test_every_route_is_documented_and_the_other_way_round() -> None:
    known = {(one.method, one.path) for one in OPERATIONS}
    missing = [f'{{"route": "{method} {path}", ...}}' for method, path in sorted(routes() - known)]
    assert not missing, f"add to server/api/openapi/operations.json: {', '.join(missing)}"
    assert known - routes() == set(), "no route has these"


def test_an_operation_is_a_line_of_the_table() -> None:
    one = ApiOperation("POST /v1/new/{id}", "Something new", "New", "DrainOrderRequest", "Version")
    made = document(SERVED, keyed=False, operations=[one])["paths"]["/v1/new/{id}"]["post"]
    assert made["operationId"] == "post_v1_new_by_id"
    assert made["parameters"][0] | {"schema": 0} == {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": 0,
    }
    assert made["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/Version"
    )
    assert "security" not in made
    assert "401" not in made["responses"]


def test_it_is_whole() -> None:
    text = json.dumps(DOCUMENT)
    validator = Validator(DOCUMENT)
    for name in set(re.findall(r'"\$ref": "([^"]+)"', text)):
        assert validator.resolved({"$ref": name})
    ids = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)
    assert {name for one in OPERATIONS for name in one.made} <= set(ids)
    for operation in OPERATIONS:
        made = DOCUMENT["paths"][operation.path][operation.method.lower()]
        assert bool(made.get("security")) != operation.open
        assert {"400", "408", "500", "503"} <= made["responses"].keys()


def test_bounds_are_those_of_the_model_that_is_served(server: Server) -> None:
    made = server.http.get("/openapi.json").json()
    fields = made["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["model"]["enum"] == ["fake", "", None]
    assert fields["temperature"]["maximum"] == 1000
    assert fields["stop_token_ids"]["items"]["maximum"] == 268
    assert made["openapi"] == "3.1.0"


CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 3}
ASKED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 2, "timings": True}),
    (
        "POST",
        "/v1/completions",
        {"prompt": ["a", [1, 2]], "n": 2, "echo": True, "prompt_logprobs": 1},
    ),
    (
        "POST",
        "/v1/completions",
        {"prompt": "hi", "stream": True, "return_token_ids": True, "logprobs": 0},
    ),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "stop": "e"}),
    (
        "POST",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    ("POST", "/v1/chat/completions", CHAT | {"model": "other"}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": True}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "background": True}),
    ("GET", "/v1/responses/resp_none", None),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages", CHAT | {"stream": True}),
    ("POST", "/v1/messages", {"messages": HI}),
    ("POST", "/v1/messages/count_tokens", {"messages": HI}),
    ("POST", "/v1/embeddings", {"input": ["hi", "you"]}),
    ("POST", "/api/chat", {"messages": HI, "options": {"num_predict": 3}}),
    ("POST", "/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 3}}),
    ("POST", "/api/chat", {}),
    ("POST", "/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 3}}),
    ("POST", "/api/generate", {"prompt": "hi", "options": {"none": 3}}),
    ("POST", "/api/show", {}),
    ("POST", "/api/pull", {}),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [65]}),
    ("GET", "/v1/requests/nobody/timeline", None),
    ("DELETE", "/v1/prefixes/nobody", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/v1/admin/state", None),
    *(
        ("GET", one.path, None)
        for one in OPERATIONS
        if one.method == "GET" and "{" not in one.path and not one.admin
    ),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [], "temperature": "hot"}),
        ("/api/generate", {"prompt": "", "keep_alive": "5m"}),
        ("/api/embed", {"input": [], "stop_token_ids": "x"}),
        ("/api/embed", {"dimensions": -1}),
        ("/api/embeddings", {"prompt": ""}),
    ],
)
def test_what_only_loads_a_model_is_in_it(server: Server, path: str, body: Any) -> None:
    content = OPEN["paths"][path]["post"]["requestBody"]["content"]
    assert server.http.post(path, json=body).status_code == 200
    assert Validator(OPEN).wrong(content["application/json"]["schema"], body) == ""


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_answers_are_what_it_says(server: Server, method: str, path: str, body: Any) -> None:
    answer = server.http.request(method, path, json=body)
    where = next(one for one in OPERATIONS if one.method == method and _fits(one.path, path))
    told = OPEN
    operation = told["paths"][where.path][method.lower()]
    assert str(answer.status_code) in operation["responses"]
    content = operation["responses"][str(answer.status_code)].get("content", {})
    kind = answer.headers.get("content-type", "").partition(";")[0]
    assert (kind in content) or (not content and not answer.content)
    validator, name = Validator(told), f"#/components/schemas/{where.events}"
    for one in _events(answer.text, kind):
        assert validator.wrong({"$ref": name}, one) == ""
    if kind == "application/json":
        assert validator.wrong(content[kind]["schema"], answer.json()) == ""
    if answer.status_code == 200:
        assert answer.headers["x-request-id"]


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) is not None


def _events(text: str, kind: str) -> list[Any]:
    lines = text.splitlines()
    if kind == "text/event-stream":
        lines = [line[6:] for line in lines if line.startswith("data: {")]
        assert lines
    return [json.loads(line) for line in lines] if kind.endswith(("event-stream", "ndjson")) else []


def test_the_page_needs_nobody_else(server: Server) -> None:
    answer = server.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert len(re.findall(r"(?:script|style)-src 'sha256-[\w+/=]{44}'", policy)) == 2
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//|https?://|@import|url\(", answer.text)
    assert answer.text == web_pages.document("docs")
    assert not re.search(r"\son\w+=|style=", answer.text), "what the policy forbids"


def test_the_page_and_the_document_need_no_key(start: Any) -> None:
    server = start("--api-key", "sesame")
    made = server.http.get("/openapi.json").json()
    assert made["paths"]["/v1/models"]["get"]["security"] == [{"ApiKey": []}, {"ApiKeyHeader": []}]
    assert server.http.get("/docs").status_code == 200
    assert server.http.get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", "OPTIONS, POST"),
        ("/v1/prefixes", "GET, HEAD, OPTIONS, POST"),
        ("/v1/responses/resp_x/", "DELETE, GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
    ],
)
def test_methods_that_a_path_has(server: Server, path: str, allowed: str) -> None:
    asked = server.http.options(path)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allowed, b"")
    refused = server.http.request("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert refused.json()["error"]["reason"] == "method_not_allowed"


def test_head_is_get_without_its_content(server: Server) -> None:
    for path in ("/v1/models", "/health", "/openapi.json", "/docs"):
        head, whole = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert server.http.head("/v1/completions").status_code == 405
