"""The page at `/`: it needs nobody else, and loads without a key."""

from __future__ import annotations

import re
from collections.abc import Callable

from pageturner.serve.home import HOME

from .conftest import Server


def test_the_page_needs_nobody_else_and_no_key(start: Callable[..., Server]) -> None:
    server = start("--api-key", "sesame")
    answer = server.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.text == HOME.read_text()
    assert not re.search(r"https?://|@import|url\(|\son\w+=|style=|innerHTML", answer.text)
    assert server.http.get("/v1/models").status_code == 401
    figures = server.http.get("/metrics").text
    for name in re.findall(r'\["(vllm:\w+)"', answer.text):
        assert f"\n{name}{{" in figures or f"\n{name} " in figures, name
