"""Every odd framing that RFC 9112 names, and what attackers make of it, sent to a server and through a router.

A row is refused with one answer and its connection closed, or it is read as what it says: then the
request behind it has its own answer. Nothing within a body is ever taken for a request.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from .conftest import Server, _end

HIDDEN = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
NEXT = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
JSON = b'{"prompt":"a","max_tokens":1}'
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(JSON), JSON)
HIDDEN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
REFUSED = ""  # one answer, of an error, and the end of the connection


def post(
    *headers: bytes, body: bytes = b"", path: bytes = b"/v1/completions", version: bytes = b"1.1"
) -> bytes:
    lines = [b"POST %s HTTP/%s" % (path, version), b"host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def length(body: bytes) -> bytes:
    return b"content-length: %d" % len(body)


def line(raw: bytes) -> bytes:
    return raw + b"\r\nhost: localhost\r\n\r\n"


CL, TE = length(JSON), b"transfer-encoding: chunked"
UPGRADE = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAA")
WEBSOCKET = (b"connection: keep-alive, upgrade", b"upgrade: websocket", b"sec-websocket-key: YQ==")
ping = b"/ping"
# what is sent, and the statuses of its answers; REFUSED: one of 4xx or 5xx
ROWS: dict[str, tuple[bytes, str]] = {
    # -- lengths: none, one, two, wrong ones
    "length": (post(CL, body=JSON), "200 200"),
    "length with leading zeros": (post(b"content-length: 000%d" % len(JSON), body=JSON), "200 200"),
    "length with spaces around": (
        post(b"content-length: \t %d \t" % len(JSON), body=JSON),
        "200 200",
    ),
    "two lengths": (post(CL, b"content-length: 0", body=HIDDEN), REFUSED),
    "two equal lengths": (post(CL, CL, body=JSON), REFUSED),
    "list of lengths": (post(b"content-length: 29, 29", body=JSON), REFUSED),
    "negative length": (post(b"content-length: -1", body=HIDDEN), REFUSED),
    "plus length": (post(b"content-length: +29", body=JSON), REFUSED),
    "hex length": (post(b"content-length: 0x1d", body=JSON), REFUSED),
    "length in words": (post(b"content-length: 29abc", body=JSON), REFUSED),
    "length with a gap": (post(b"content-length: 2 9", body=JSON), REFUSED),
    "empty length": (post(b"content-length:", body=HIDDEN), REFUSED),
    "huge length": (post(b"content-length: 18446744073709551645", body=JSON), REFUSED),
    "folded length": (post(b"content-length:\r\n 29", body=JSON), REFUSED),
    # -- codings
    "chunks": (post(TE, body=CHUNKS), "200 200"),
    "chunks in capitals": (post(b"Transfer-Encoding: CHUNKED", body=CHUNKS), "200 200"),
    "length and chunks": (post(CL, TE, body=CHUNKS), REFUSED),
    "chunks and length": (post(TE, b"content-length: 5", body=b"0\r\n\r\n" + HIDDEN), REFUSED),
    "identity and length": (post(b"transfer-encoding: identity", CL, body=JSON), REFUSED),
    "chunked twice": (post(b"transfer-encoding: chunked, chunked", body=CHUNKS), REFUSED),
    "chunked and identity": (post(TE, b"transfer-encoding: identity", body=CHUNKS), REFUSED),
    "chunked not last": (post(b"transfer-encoding: chunked, gzip", body=CHUNKS), REFUSED),
    "unknown coding": (post(b"transfer-encoding: xchunked", body=CHUNKS), REFUSED),
    "quoted coding": (post(b'transfer-encoding: "chunked"', body=CHUNKS), REFUSED),
    "coding with a tail": (post(b"transfer-encoding: chunked;q=1", body=CHUNKS), REFUSED),
    "coding with a vertical tab": (post(b"transfer-encoding: \x0bchunked", body=CHUNKS), REFUSED),
    "coding with a NUL": (post(b"transfer-encoding: chunked\0", body=CHUNKS), REFUSED),
    "folded coding": (post(b"transfer-encoding:\r\n chunked", body=CHUNKS), REFUSED),
    "space before the colon": (post(b"transfer-encoding : chunked", CL, body=JSON), REFUSED),
    "tab before the colon": (post(b"transfer-encoding\t: chunked", CL, body=JSON), REFUSED),
    "space before the name": (post(b" transfer-encoding: chunked", CL, body=JSON), REFUSED),
    "name with a NUL": (post(b"transfer-encoding\0: chunked", CL, body=JSON), REFUSED),
    "name with an underscore": (post(b"transfer_encoding: chunked", CL, body=JSON), "200 200"),
    "coding behind a bare CR": (post(b"a: b\rtransfer-encoding: chunked", CL, body=JSON), REFUSED),
    "coding behind a bare LF": (post(b"a: b\ntransfer-encoding: chunked", CL, body=JSON), REFUSED),
    # -- chunks
    "chunk extension": (post(TE, body=CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)), "200 200"),
    "trailers are no headers": (
        post(TE, body=CHUNKS[:-2] + b"x-api-key: evil\r\nhost: y\r\n\r\n"),
        "200 200",
    ),
    "length in trailers": (post(TE, body=CHUNKS[:-2] + b"content-length: 9\r\n\r\n"), REFUSED),
    **{
        f"chunk size {size!r}": (post(TE, body=size + b"\r\n" + JSON + b"\r\n0\r\n\r\n"), REFUSED)
        for size in (b"0x1d", b"+1d", b"-1", b"", b"1d_0", b"1d\0", b"ffffffffffffffffff", b" 1d")
    },
    "chunk longer than said": (post(TE, body=b"3\r\n" + JSON + b"\r\n0\r\n\r\n"), REFUSED),
    "chunk without its end": (post(TE, body=b"1d\r\n" + JSON + b"0\r\n\r\n"), REFUSED),
    "chunk size behind a bare LF": (post(TE, body=b"1d\n" + JSON + b"\r\n0\r\n\r\n"), REFUSED),
    "extension with a bare LF": (post(TE, body=b"1d;\n" + JSON + b"\r\n0\r\n\r\n"), REFUSED),
    "extension with a bare CR": (post(TE, body=b"1d;a\rb\r\n" + JSON + b"\r\n0\r\n\r\n"), REFUSED),
    # -- an Upgrade that is not taken
    "upgrade": (post(*UPGRADE, CL, body=JSON), "200 200"),
    "upgrade, chunks": (post(*UPGRADE, TE, body=CHUNKS), "200 200"),
    "upgrade, keep-alive": (
        post(b"connection: keep-alive, Upgrade", b"upgrade: h2c", CL, body=JSON),
        "200 200",
    ),
    "upgrade to a websocket": (post(*WEBSOCKET, CL, body=JSON), "200 200"),
    "upgrade, nothing": (post(*UPGRADE, b"content-length: 0", path=ping), "200 200"),
    "upgrade, no body": (line(b"GET /version HTTP/1.1\r\n" + b"\r\n".join(UPGRADE)), "200 200"),
    "upgrade, hidden": (post(*UPGRADE, length(HIDDEN), body=HIDDEN, path=ping), "200 200"),
    "upgrade, hidden in chunks": (post(*UPGRADE, TE, body=HIDDEN_CHUNKS, path=ping), "200 200"),
    "upgrade, waiting": (post(*UPGRADE, b"expect: 100-continue", CL, body=JSON), "100 200 200"),
    "upgrade, two lengths": (post(*UPGRADE, CL, b"content-length: 0", body=HIDDEN), REFUSED),
    "upgrade, length and chunks": (post(*UPGRADE, CL, TE, body=CHUNKS), REFUSED),
    "upgrades": (2 * post(*UPGRADE, CL, body=JSON), "200 200 200"),
    "upgrade, last request": (post(*UPGRADE, b"connection: close", CL, body=JSON), "200"),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\nhost: localhost:1\r\n\r\n" + HIDDEN, REFUSED),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    # -- bodies that nobody reads
    "hidden": (post(length(HIDDEN), body=HIDDEN, path=ping), "200 200"),
    "hidden in chunks": (post(TE, body=HIDDEN_CHUNKS, path=ping), "200 200"),
    "hidden, no such path": (post(length(HIDDEN), body=HIDDEN, path=b"/none"), "404 200"),
    "hidden in a GET": (
        b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + length(HIDDEN) + b"\r\n\r\n" + HIDDEN,
        "200 200",
    ),
    "hidden, of no type": (
        post(length(HIDDEN), b"content-type: text/plain", body=HIDDEN),
        "415 200",
    ),
    # -- versions and lines
    "HTTP/1.0": (post(CL, body=JSON, version=b"1.0"), "200"),
    "HTTP/1.0, kept": (post(b"connection: keep-alive", CL, body=JSON, version=b"1.0"), "200"),
    "HTTP/1.0, chunks": (post(TE, body=CHUNKS, version=b"1.0"), REFUSED),
    **{
        f"HTTP/{version.decode()}": (post(CL, body=JSON, version=version), REFUSED)
        for version in (b"0.9", b"1.2", b"2.0", b"3.0", b"1.10", b"1", b"1.1 HTTP/1.1", b" 1.1")
    },
    "no version": (b"GET /version\r\n", REFUSED),
    "empty lines before": (b"\r\n\r\n" + post(CL, body=JSON), "200 200"),
    "small method": (line(b"get /version HTTP/1.1"), REFUSED),
    "space in the target": (line(b"GET /ver sion HTTP/1.1"), REFUSED),
    "NUL in the target": (line(b"GET /version\0 HTTP/1.1"), REFUSED),
    "no Host": (b"GET /version HTTP/1.1\r\n\r\n", REFUSED),
    "Host in the target only": (b"GET http://localhost/version HTTP/1.1\r\n\r\n", REFUSED),
    "another Host in the target": (line(b"GET http://y/version HTTP/1.1"), REFUSED),
    "the Host in the target": (line(b"GET http://localhost/version HTTP/1.1"), "200 200"),
    "Host of two words": (b"GET /version HTTP/1.1\r\nhost: localhost y\r\n\r\n", REFUSED),
    "Host with a path": (b"GET /version HTTP/1.1\r\nhost: localhost/y\r\n\r\n", REFUSED),
    "two Hosts": (b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n", "400 200"),
    "line without a colon": (line(b"GET /version HTTP/1.1\r\nabc"), REFUSED),
    "header without a name": (line(b"GET /version HTTP/1.1\r\n: b"), REFUSED),
    "folded header": (line(b"GET /version HTTP/1.1\r\na: b\r\n c"), REFUSED),
    "bare LF in the head": (b"GET /version HTTP/1.1\nhost: localhost\n\n", REFUSED),
    "bare CR in the head": (line(b"GET /version HTTP/1.1\r\na: b\rc: d"), REFUSED),
}


@pytest.fixture(scope="module")
def sides(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """A server, and a router before it."""
    folder = tmp_path_factory.mktemp("router")
    router = Server(folder, [server.url], {}, wait=True, command="route")
    yield {"server": server, "router": router}
    _end(router)


def answered(url: str, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the connection is closed."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), 10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02 if len(parts) > 1 else 0.0)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def statuses(url: str, *parts: bytes) -> list[str]:
    """The statuses of all answers to these bytes."""
    return re.findall(r"HTTP/1\.1 (\d{3}) [A-Z]", answered(url, *parts).decode())


def is_refusal(told: list[str]) -> bool:
    return len(told) == 1 and told[0][0] in "45"


@pytest.mark.parametrize("at", ["server", "router"])
@pytest.mark.parametrize("name", ROWS)
def test_framing(sides: dict[str, Server], at: str, name: str) -> None:
    raw, wanted = ROWS[name]
    told = statuses(sides[at].url, raw + NEXT)
    if wanted:
        assert told == wanted.split()
    else:
        assert is_refusal(told)
    assert "smuggled" not in sides["server"].log + sides["router"].log


@pytest.mark.parametrize("at", ["server", "router"])
@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("upgrade")])
def test_an_upgrade_in_pieces(sides: dict[str, Server], at: str, name: str) -> None:
    """The body behind an Upgrade comes in packets of its own."""
    raw, wanted = ROWS[name]
    cuts = sorted({10, raw.index(b"\r\n\r\n") + 2, raw.index(b"\r\n\r\n") + 4, len(raw) - 3})
    parts = [raw[i:k] for i, k in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    told = statuses(sides[at].url, *parts, NEXT)
    assert told == wanted.split() or (not wanted and is_refusal(told))
    assert "smuggled" not in sides["server"].log + sides["router"].log


@pytest.mark.parametrize("at", ["server", "router"])
def test_an_answer_to_http_1_0_ends_with_its_connection(sides: dict[str, Server], at: str) -> None:
    body = JSON[:-1] + b',"stream":true}'
    answer = answered(sides[at].url, post(length(body), body=body, version=b"1.0"))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert content.startswith(b"data: {")
    assert content.endswith(b"data: [DONE]\n\n")
