"""A link between two engines: bounded frames over TCP, which only who has the shared key can write.

Owns the form of a frame, the handshake, and that each side knows whom it talks to before anything
of a request is sent. Must not know what the frames are for.

    both       HELLO    magic, version, 32 random bytes                      plain
    both       from here on each frame ends with a code of its direction, number and content, by a
               key that is made of the shared key and the random bytes of both: what is not the
               peer's is no frame
    asker      PEER     what its KV depends on
    answerer   PEER     the same of it; or REFUSED and the name of what differs
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

MAGIC, VERSION = b"pageturner-kv", 1
HELLO, PEER, REFUSED, PREFILL, BLOCK, DONE = b"H", b"P", b"R", b"A", b"B", b"D"
MAX_SMALL = 4096  # bytes of any frame of the handshake
CODE = 16  # bytes of the code of a frame
LEAST_KEY = 16  # bytes of a shared key

_head = struct.Struct("<cI")


class LinkError(Exception):
    """The link is of no use. cause: unreachable, refused, late, broken or wrong."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """The facts that must be equal at both ends. weights: digest; build: fingerprint of engine; kv:
    form of a block."""

    weights: str
    build: str
    kv: str
    block_size: int

    def differs(self, other: LinkIdentity) -> str:
        """Return the name of the first fact that differs; "" where none does."""
        parts = {
            "model": "weights",
            "build or KV type": "build",
            "form of KV": "kv",
            "block size": "block_size",
        }
        names = (
            name for name, part in parts.items() if getattr(self, part) != getattr(other, part)
        )
        return next(names, "")


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of every link of an engine. key: what both ends share; identity: what must be
    equal."""

    key: bytes
    identity: LinkIdentity

    def ask(self, sock: socket.socket, until: float) -> Link:
        """Return a link to an engine that is asked, once both know each other."""
        link = Link(sock, (ASKER, ANSWERER), self.key, until)
        self._introduce(link, until)
        kind, content = link.receive(MAX_SMALL, until)
        if kind == REFUSED:
            raise LinkError("refused", bytes(content).decode(errors="replace"))
        _compare(self.identity, kind, content)
        return link

    def answer(self, sock: socket.socket, until: float) -> Link:
        """Return a link to an engine that asks, once both know each other."""
        link = Link(sock, (ANSWERER, ASKER), self.key, until)
        kind, content = link.receive(MAX_SMALL, until)
        try:
            _compare(self.identity, kind, content)
        except LinkError as error:
            link.send(REFUSED, str(error).encode(), _left(until))
            raise
        self._introduce(link, until)
        return link

    def _introduce(self, link: Link, until: float) -> None:
        link.send(PEER, msgspec.json.encode(self.identity), _left(until))


class Link:
    """One connection, with one thread at each end. Everything raises LinkError. `sides`: own and
    other."""

    def __init__(
        self, sock: socket.socket, sides: tuple[bytes, bytes], key: bytes, until: float
    ) -> None:
        self._sock, (self._mine, self._its) = sock, sides
        self._key = b""
        self._sent = self._received = 0
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._greet(key, until)

    def send(self, kind: bytes, content: bytes | memoryview, seconds: float) -> None:
        """Returns when the system has all of it, which waits for the peer to read."""
        head = _head.pack(kind, len(content))
        code = self._code(self._mine, self._sent, head, content)
        self._sent += 1
        try:
            self._sock.settimeout(seconds)
            self._sock.sendall(b"".join((head, content, code)))
        except TimeoutError:
            raise LinkError("late", "the peer does not read") from None
        except OSError as error:
            raise LinkError("broken", str(error)) from None

    def receive(self, most: int, until: float) -> tuple[bytes, memoryview]:
        """Kind and content of the next frame, of at most so many bytes. until: by
        `time.monotonic`."""
        head = bytes(self._exactly(_head.size, until))
        kind, length = _head.unpack(head)
        if length > most:
            raise LinkError("wrong", f"a frame of {length:,} bytes where {most:,} are the most")
        content = self._exactly(length, until)
        code = self._code(self._its, self._received, head, content)
        if code and not hmac.compare_digest(code, bytes(self._exactly(CODE, until))):
            raise LinkError("refused", "another key: give both engines the same one")
        self._received += 1
        return kind, content

    def _exactly(self, length: int, until: float) -> memoryview:
        data = memoryview(bytearray(length))
        at = 0
        try:
            while at < length:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._sock.settimeout(left)
                got = self._sock.recv_into(data[at:])
                if not got:
                    raise LinkError("broken", "the peer has closed the link")
                at += got
        except TimeoutError:
            raise LinkError("late", "the peer says nothing") from None
        except OSError as error:
            raise LinkError("broken", str(error)) from None
        return data

    def _code(self, side: bytes, number: int, head: bytes, content: bytes | memoryview) -> bytes:
        if not self._key:
            return b""
        digest = hashlib.blake2b(key=self._key, digest_size=CODE, person=side)
        digest.update(number.to_bytes(8, "little") + head)
        digest.update(content)
        return digest.digest()

    def _greet(self, key: bytes, until: float) -> None:
        """Exchange random bytes with the peer, from which the key of the codes is made."""
        mine = secrets.token_bytes(32)
        hello = MAGIC + bytes([VERSION])
        self.send(HELLO, hello + mine, _left(until))
        kind, content = self.receive(MAX_SMALL, until)
        if (
            kind != HELLO
            or bytes(content[: len(MAGIC)]) != MAGIC
            or len(content) != len(hello) + 32
        ):
            raise LinkError("wrong", "it is no engine of Pageturner")
        if bytes(content[: len(hello)]) != hello:
            raise LinkError(
                "refused", "another version of Pageturner: take the same for both engines"
            )
        its = bytes(content[len(hello) :])
        nonces = mine + its if self._mine == ASKER else its + mine
        self._key = hmac.digest(key, MAGIC + nonces, "sha256")
        self._sent = self._received = 0


ASKER, ANSWERER = b"asker", b"answerer"


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _compare(mine: LinkIdentity, kind: bytes, content: memoryview) -> None:
    try:
        its = msgspec.json.decode(content, type=LinkIdentity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LinkError("wrong", "a peer that does not say what it is") from None
    if kind != PEER or (what := mine.differs(its)):
        name = what if kind == PEER else "protocol"
        raise LinkError("refused", f"another {name}: both engines need the same")
