"""Requests as HTTP sees them: counted by the route that answers, whatever clients write."""

from __future__ import annotations

import re
from typing import Any

from .conftest import Server
from .test_http import post


def counts(server: Server) -> dict[tuple[str, str, str], float]:
    line = r'^http_requests_total\{handler="(.*)",method="(.*)",status="(.*)"\} (\S+)$'
    found = re.findall(line, server.http.get("/metrics").text, re.M)
    return {(handler, method, status): float(n) for handler, method, status, n in found}


def test_handlers_are_named_by_their_routes(start: Any) -> None:
    server = start()
    assert post(server, max_tokens=2).status_code == 200
    assert post(server, max_tokens=-2).status_code == 400
    for path in (
        "/v1/requests/one/timeline",
        "/v1/requests/two/timeline",
        "/no/such/path",
        "/or/such",
    ):
        assert server.http.get(path).status_code == 404
    assert server.http.request("PROPFIND", "/no/such/path").status_code == 404
    server.http.get("/health")
    assert counts(server) == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/requests/{id}/timeline", "GET", "4xx"): 2,
        ("none", "GET", "4xx"): 2,
        ("none", "other", "4xx"): 1,
    }
    assert server.metric("http_request_duration_seconds_count") == 7
    assert server.metric("http_request_duration_seconds_sum") > 0
