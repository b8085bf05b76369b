"""What web pages, and foreign names, may ask of a server without keys; and who says whose a request is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pageturner.errors import ClientError
from pageturner.http.origins import EVERYTHING, OriginRules, origin_rules
from support.refusals import engine_fault, refusal_of

from .conftest import Server

Start = Callable[..., Server]
LOCAL = origin_rules("127.0.0.1", "", "")
OPEN = origin_rules("0.0.0.0", "chat.example.com", "https://pages.example.com/, https://b.example")


def verdict(rules: OriginRules, method: str = "POST", **headers: str) -> str:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    try:
        rules.check(method, given)
    except ClientError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "127.8.0.1",
        "[::1]:80",
        "a.localhost",
        "localhost.",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert verdict(LOCAL, host=host) == verdict(OPEN, host=host) == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "a:b:c", "[x"]
)
def test_names_that_somebody_could_have_made_point_here(host: str) -> None:
    assert verdict(LOCAL, host=host) == verdict(OPEN, host=host) == "host_not_allowed"
    assert verdict(EVERYTHING, host=host) == ""


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "[fe80::1]", "gpu-box:8000"])
def test_addresses_and_bare_names_are_ours_unless_only_this_machine_may_ask(host: str) -> None:
    assert verdict(OPEN, host=host) == ""
    assert verdict(LOCAL, host=host) == "host_not_allowed"


def test_names_and_origins_that_are_allowed() -> None:
    assert verdict(OPEN, host="chat.example.com:80") == verdict(OPEN) == ""
    for origin in ("https://pages.example.com", "https://b.example", "http://chat.example.com"):
        assert verdict(OPEN, host="chat.example.com", origin=origin) == ""
    assert verdict(origin_rules("127.0.0.1", "*", "*"), host="x.y", origin="null") == ""


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:3000", "", "127.0.0.1:8000"]
)
def test_pages_of_other_origins(origin: str) -> None:
    assert verdict(LOCAL, host="127.0.0.1:8000", origin=origin) == "origin_not_allowed"
    assert verdict(LOCAL, "GET", host="127.0.0.1:8000", origin=origin) == "origin_not_allowed"


def test_pages_must_say_that_they_send_json_and_others_need_not() -> None:
    page = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    for kind in ("application/json", "application/json; charset=utf-8", "application/x+json"):
        assert verdict(LOCAL, content_type=kind, **page) == ""
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "text/json",
        "application/jsonx",
    ):
        assert verdict(LOCAL, content_type=kind, **page) == "unsupported_media_type"
        assert (
            verdict(LOCAL, "GET", content_type=kind, **page)
            == verdict(LOCAL, content_type=kind)
            == ""
        )


@pytest.mark.parametrize("origin", ["pages.example", "https://pages.example/path", ",x"])
def test_what_no_browser_sends_as_its_origin_is_told(origin: str) -> None:
    with engine_fault("allowed_origins"):
        origin_rules("127.0.0.1", "", origin)


def test_a_page_cannot_ask_over_http_and_curl_can(server: Server) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post("/v1/completions", content=body, headers=form).status_code == 200
    for headers, flag in (
        ({"origin": "https://evil.example"}, "--allowed-origins"),
        ({"host": "evil.example"}, "--allowed-hosts"),
    ):
        refused = server.http.post(
            "/v1/completions", content=body, headers=headers | {"content-type": "text/plain"}
        )
        assert refused.status_code == 403
        assert flag in refused.json()["error"]["message"]
    assert server.http.get("/health", headers={"host": "evil.example"}).status_code == 200


def test_only_json_is_read(server: Server, start: Start) -> None:
    keyed = start("--api-key", "sesame")
    curl = "application/x-www-form-urlencoded"
    for kind, more, status in (
        ("application/json; charset=utf-8", {}, 200),
        ("Application/vnd.api+JSON", {}, 200),
        ("", {}, 200),
        (curl, {}, 200),
        (curl, {"sec-fetch-site": "none"}, 415),
        ("text/plain", {}, 415),
        ("text/plain;charset=UTF-8", {}, 415),
        ("multipart/form-data; boundary=x", {}, 415),
        ("application/jsonx", {}, 415),
    ):
        for asked, key in ((server, {}), (keyed, {"authorization": "Bearer sesame"})):
            headers = {"content-type": kind, **more, **key}
            body = b'{"prompt": "hello", "max_tokens": 1}'
            answer = asked.http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, kind
            assert status == 200 or answer.json()["error"]["reason"] == "unsupported_media_type"


def test_pages_are_there_under_the_names_of_the_server(server: Server, start: Start) -> None:
    keyed = start("--api-key", "k")
    router = start(server.url, command="route")
    for path in ("/", "/docs", "/openapi.json"):
        for one in (server, router):
            if one is router and path == "/":
                continue  # which has no such page
            own = one.http.get(path)
            foreign = one.http.get(path, headers={"host": "evil.example"})
            assert own.status_code == 200
            assert refusal_of(foreign) == (
                403,
                "host_not_allowed",
            )
        assert keyed.http.get(path, headers={"host": "open.example"}).status_code == 200
    for path in ("/health", "/ping", "/load", "/metrics", "/version"):
        assert server.http.get(path, headers={"host": "probe.example"}).status_code == 200


def test_no_page_may_read_unless_it_is_named(server: Server) -> None:
    page = {"origin": "https://pages.example", "access-control-request-method": "POST"}
    preflight = server.http.options("/v1/completions", headers=page)
    assert preflight.status_code == 403
    own = server.http.get("/v1/models", headers={"origin": server.url})
    assert own.status_code == 200
    for answer in (preflight, own, server.http.get("/health", headers=page)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_page_that_may_ask_may_also_read(start: Start) -> None:
    server = start("--allowed-origins", "https://pages.example")
    page = {"origin": "https://pages.example"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
        "access-control-request-private-network": "true",  # it comes from the open network
    }
    preflight = server.http.options("/v1/completions", headers=page | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-private-network"] == "true"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = server.http.post(
        "/v1/completions", json={"prompt": "hi", "max_tokens": 1}, headers=page
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert (
        server.http.options(
            "/v1/completions", headers=asked | {"origin": "https://evil.example"}
        ).status_code
        == 400
    )


def test_with_keys_the_key_decides(start: Start) -> None:
    server = start("--api-key", "sesame")
    headers = {
        "authorization": "Bearer sesame",
        "host": "behind.a.gateway.example",
        "origin": "https://any.example",
    }
    assert server.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["X-Tenant", "X-Priority", "Authorization"])
def test_what_says_whose_a_request_is_may_be_said_only_once(server: Server, name: str) -> None:
    headers = [(name, "good"), (name.lower(), "evil")]
    refused = server.http.get("/v1/models", headers=headers)
    assert refusal_of(refused) == (400, "duplicate_header")
