"""The same server behind TLS: its certificate, handshakes that do not end, and the bounds of HTTP within."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import ServerConfig
from pageturner.http import http_client
from pageturner.http.http_client import ConnectionLost, parse_address
from pageturner.http.tls import Certificates, certificates_of
from support.refusals import engine_fault

from .conftest import Server
from .test_http_limits import HEAD, Loopback, loopback, said

FILES = Path(__file__).with_name("tls")
CERT, KEY = str(FILES / "cert.pem"), str(FILES / "key.pem")
CONFIG = ServerConfig(ssl_certfile=CERT, ssl_keyfile=KEY)
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def client_context(**versions: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERT)
    for name, version in versions.items():
        setattr(context, name, version)
    return context


def with_tls(test: Callable[[Loopback], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        async with loopback(certificates=Certificates(CONFIG), **limits) as here:
            here.tls = client_context()
            await test(here)

    asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_answer_comes_encrypted() -> None:
    async def test(here: Loopback) -> None:
        body = b"x" * 30_000
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert (await here.send(head + body)).endswith("\r\n\r\nok")
        assert here.asked[0][1] == body

    with_tls(test)


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_does_not_end_is_cut_off(begin: bytes) -> None:
    async def test(here: Loopback) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(begin)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        await until(lambda: here.refused["tls_handshake"])

    with_tls(test)


def test_who_speaks_no_tls_hurts_nobody() -> None:
    async def test(here: Loopback) -> None:
        here.tls = None
        assert "HTTP" not in await here.send(GET)
        here.tls = client_context()
        assert "200 OK" in await here.send(GET)

    with_tls(test)


def test_who_is_still_shaking_hands_makes_room() -> None:
    async def test(here: Loopback) -> None:
        halves = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(2)]
        assert "200 OK" in await here.send(GET)
        assert here.refused["idle_closed"] == 1
        for _, writer in halves:
            writer.close()

    with_tls(test, connections=2, head_seconds=20.0)


def test_too_many_are_closed() -> None:
    async def test(here: Loopback) -> None:
        here.may_answer.clear()
        asking = asyncio.ensure_future(here.send(GET))
        await until(lambda: here.asked)
        with pytest.raises(OSError):  # noqa: PT011  # reset, or no handshake
            await here.connect()
        assert here.refused["busy"] == 1
        here.may_answer.set()
        assert "200 OK" in await asking

    with_tls(test, connections=1)


def test_heads_and_bodies_have_their_time() -> None:
    async def test(here: Loopback) -> None:
        for part in (HEAD, HEAD + b"content-length: 5\r\n\r\nab"):
            assert said(await here.send(part)) == (408, "request_timeout")

    with_tls(test)


async def secured(here: Loopback, sock: socket.socket) -> ssl.SSLSocket:
    """A client's end that reads only what this test reads."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", here.port))
    return await asyncio.to_thread(client_context().wrap_socket, sock, server_hostname="localhost")


@pytest.mark.parametrize("request_", [GET, GET.replace(b"connection: close\r\n", b"")])
async def test_who_does_not_read_is_cut_off(request_: bytes) -> None:
    """What was encrypted waits, too."""

    async with loopback(b"x" * 20_000_000, Certificates(CONFIG)) as here:
        with socket.socket() as sock, await secured(here, sock) as secure:
            secure.sendall(request_)
            await until(lambda: here.refused["client_too_slow"])


def test_who_does_not_say_goodbye_is_not_waited_for() -> None:
    async def test(here: Loopback) -> None:
        with socket.socket() as sock, await secured(here, sock) as secure:
            secure.sendall(GET)
            with socket.socket(fileno=os.dup(secure.fileno())) as raw:
                raw.settimeout(20)

                def read_all() -> bytes:
                    with contextlib.suppress(ConnectionError):
                        while secure.recv(1 << 16):
                            pass
                        return raw.recv(1)
                    return b""

                assert await asyncio.to_thread(read_all) == b""

    with_tls(test)


def test_old_versions_are_refused() -> None:
    async def test(here: Loopback) -> None:
        here.tls = client_context(maximum_version=ssl.TLSVersion.TLSv1_2)
        assert "200 OK" in await here.send(GET)
        assert here.tls.maximum_version == Certificates(CONFIG).context.minimum_version

    with_tls(test)


def test_a_certificate_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cert.pem", "key.pem"):
        shutil.copy(FILES / name, tmp_path)
    own = Certificates(
        ServerConfig(ssl_certfile=f"{tmp_path}/cert.pem", ssl_keyfile=f"{tmp_path}/key.pem")
    )
    first = own.context
    shutil.copy(FILES / "other_cert.pem", tmp_path / "cert.pem")
    own.reload()
    assert own.context is first
    assert "stays as it was" in caplog.text
    shutil.copy(FILES / "other_key.pem", tmp_path / "key.pem")
    own.reload()
    assert own.context is not first


@pytest.mark.parametrize(
    ("cert", "key", "password", "says"),
    [
        ("none.pem", "", "", "cannot read .*none.pem: No such file"),
        ("cert.pem", "none.pem", "", "cannot read .*none.pem: No such file"),
        ("cert.pem", "", "", "cannot use the certificate"),
        ("cert.pem", "other_key.pem", "", "belong together"),
        ("key.pem", "key.pem", "", "cannot use the certificate"),
        ("cert.pem", "encrypted.pem", "", "--ssl-keyfile-password"),
        ("cert.pem", "encrypted.pem", "wrong", "--ssl-keyfile-password"),
    ],
)
def test_files_that_cannot_be_used(cert: str, key: str, password: str, says: str) -> None:
    keyfile = str(FILES / key) if key else ""
    config = ServerConfig(
        ssl_certfile=str(FILES / cert), ssl_keyfile=keyfile, ssl_keyfile_password=password
    )
    with engine_fault(says):
        certificates_of(config)


def test_what_goes_together() -> None:
    assert certificates_of(ServerConfig()) is None
    encrypted = ServerConfig(
        ssl_certfile=CERT, ssl_keyfile=str(FILES / "encrypted.pem"), ssl_keyfile_password="sesame"
    )
    assert certificates_of(encrypted) is not None
    with engine_fault("give --ssl-certfile too"):
        certificates_of(ServerConfig(ssl_keyfile=KEY))


def test_a_client_of_ours_checks_who_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with loopback(certificates=Certificates(CONFIG)) as here:
            url = f"https://localhost:{here.port}"
            good = parse_address(url, "it", CERT)
            assert str(good) == url
            assert await http_client.get(good, "/", 5.0) == (200, b"ok")
            other = parse_address(url, "it", str(FILES / "other_cert.pem"))
            with pytest.raises(ConnectionLost, match="certificate"):
                await http_client.get(other, "/", 5.0)

    asyncio.run(run())
    with engine_fault("cannot read certificates from"):
        parse_address("https://localhost", "it", str(tmp_path / "none"))


@pytest.mark.slow
def test_a_server_and_a_router_speak_https(start: Callable[..., Server]) -> None:
    flags = ("--ssl-certfile", CERT, "--ssl-keyfile", KEY)
    server = start(*flags)
    assert server.url.startswith("https://")
    body = {"prompt": "hello", "max_tokens": 20, "stream": True}
    streamed = server.http.post("/v1/completions", json=body).text
    assert streamed.endswith("data: [DONE]\n\n")
    router = start(
        server.url.replace("127.0.0.1", "localhost"), "--ssl-ca", CERT, *flags, command="route"
    )
    assert router.url.startswith("https://")
    asked = router.http.post("/v1/completions", json=body)
    assert (asked.status_code, asked.text.count("data: {")) == (200, 20)
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: "the certificate was read again" in server.log)
    assert server.http.get("/health").status_code == 200


def test_a_wrong_file_is_an_error_at_the_start(start: Callable[..., Server]) -> None:
    server = start("--ssl-certfile", "none.pem", wait=False)
    assert "cannot read none.pem" in server.finished()
    assert server.process.returncode == 1
