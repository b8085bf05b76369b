"""The HTTP client's own parts; the router's tests ask real sockets with the rest."""

from __future__ import annotations

import pytest

from pageturner.http.http_client import EventSplitter, ServerAddress, request_bytes

STREAM = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_their_bytes_come(size: int) -> None:
    splitter = EventSplitter()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == [
        b'{"a": 1}',
        b'{"b": "\xc3\xa9"}',
        b"[DONE]",
    ]


def test_a_request_has_its_length_unless_it_is_a_get_without_a_body() -> None:
    address = ServerAddress("::1", 80, "/base")
    head = b" /base/x?y HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n"
    assert request_bytes(address, "GET", "/x?y", [], b"") == b"GET" + head + b"\r\n"
    posted = request_bytes(address, "POST", "/x?y", [(b"accept", b"*/*")], b"{}")
    assert posted == b"POST" + head + b"Content-Length: 2\r\naccept: */*\r\n\r\n{}"
