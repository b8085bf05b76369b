"""TLS for a program that listens: its certificate, and each connection until it is encrypted.

Owns which files are read and when, how long a handshake may take, and that connections count from
their first byte on. What is encrypted is http_protocol.py's affair, and so are its bounds. Must not
know requests.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from pageturner.config.settings import HttpConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.http.http_limits import OpenConnections
from pageturner.http.http_protocol import BoundedProtocol

log = logging.getLogger("pageturner")

GOODBYE_SECONDS = (
    3600.0  # for the last bytes of an answer: who does not read is cut off long before
)


class Certificates:
    """The certificate of a server. EngineFault where its files cannot be used."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self.context = server_context(config)

    def reload(self) -> None:
        """Read the files again, for connections from now on. Where that fails all stays as it
        was."""
        try:
            self.context = server_context(self._config)
        except EngineFault as fault:
            log.error("the certificate stays as it was: %s", fault.message)
        else:
            log.info("the certificate was read again")


def certificates_of(config: HttpConfig) -> Certificates | None:
    """Return the certificates of a server with these settings; None: it speaks plain HTTP.
    EngineFault as above."""
    if not config.ssl_certfile and (config.ssl_keyfile or config.ssl_keyfile_password):
        raise bad_setting("--ssl-keyfile is the key of a certificate: give --ssl-certfile too")
    return Certificates(config) if config.ssl_certfile else None


def server_context(config: HttpConfig) -> ssl.SSLContext:
    """TLS 1.2 or newer with the certificate and its key, both PEM. Without a key file the key is in
    the same file."""
    certfile = config.ssl_certfile
    keyfile = config.ssl_keyfile or certfile
    for path in (certfile, keyfile):  # what OpenSSL says does not name the file
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise bad_setting(f"cannot read {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # without it OpenSSL would ask a terminal
        context.load_cert_chain(certfile, keyfile, lambda: config.ssl_keyfile_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise bad_setting(
            f"cannot use the certificate {certfile} with the key {keyfile}: {reason}. Both are PEM files that"
            " belong together; an encrypted key needs --ssl-keyfile-password"
        ) from error
    return context


class Handshake(asyncio.Protocol):
    """A connection until it is encrypted: from then on `behind` has it. It counts as one without a
    request, which is closed when others need its place."""

    def __init__(
        self,
        shared: OpenConnections,
        certificates: Certificates,
        behind: Callable[[], BoundedProtocol],
    ) -> None:
        self._shared, self._certificates, self._behind = shared, certificates, behind
        self._transport: asyncio.Transport | None = None
        self._entered = self._lost = False
        self._early: list[bytes] = []  # of what is encrypted, before `behind` has the connection
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # the first bytes are those of the handshake
        self._entered = True
        if not self._shared.enter(self):
            self._shared.refused["busy"] += 1
            self._leave()
            transport.abort()
            return
        self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._leave()

    def make_room(self) -> None:
        """Close this connection, because another client wants to connect."""
        self._shared.refused["idle_closed"] += 1
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def drop_body(self) -> None:
        """Do nothing: a handshake has no body."""

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self._shared.leave(self)

    async def _shake(self, plain: asyncio.Transport) -> None:
        limits, loop = self._shared.limits, asyncio.get_running_loop()
        try:
            secure = await loop.start_tls(
                plain,
                self,
                self._certificates.context,
                server_side=True,
                ssl_handshake_timeout=limits.head_seconds,
                ssl_shutdown_timeout=GOODBYE_SECONDS,
            )
        except OSError as error:  # TLS's own errors and a time that is over are among them
            self._shared.refused["tls_handshake"] += 1
            log.debug("no TLS: %s", error)
            return
        finally:
            self._leave()
        if secure is None or self._lost:
            return
        behind = self._behind()
        behind.lower = plain
        secure.set_write_buffer_limits(HIGH_WATER_LIMIT)
        secure.set_protocol(behind)
        behind.connection_made(secure)
        for data in self._early:
            behind.data_received(data)


def encrypted(shared: OpenConnections, certificates: Certificates, **of_uvicorn: Any) -> Handshake:
    """Return what uvicorn asks for each connection."""
    return Handshake(shared, certificates, lambda: BoundedProtocol(shared, **of_uvicorn))
