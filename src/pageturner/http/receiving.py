"""The parts of a request that every path has: the path itself, its body, as far as anybody wants
it, and the end of its client.

Must not know what a body says.
"""

from __future__ import annotations

import asyncio
import re

from starlette.types import Message, Receive

from pageturner.errors import ClientError

MAX_DISCARDED = 64 * 1024 * 1024  # bytes of a refused body that are read and thrown away
DISCARD_SECONDS = 5.0
PLAIN = (b"", b"identity")
BOM = b"\xef\xbb\xbf"  # which some editors and libraries write before JSON (RFC 8259, 8.1)
JSON = re.compile(rb"\s*(?:application/(?:[\w.-]+\+)?json\s*(?:;.*)?)?", re.IGNORECASE)
CURL = b"application/x-www-form-urlencoded"
FORMS = frozenset({"/v1/files"})  # paths to which files are sent


# the API whose version clients of llama.cpp leave out, and others whose base URL lacks it
_UNVERSIONED = re.compile(
    r"/(chat/completions|completions|embeddings|messages|models|rerank(ing)?|responses|score)(/|\Z)"
)


def canonical_path(path: str) -> str:
    """Return the path by which a request is routed: with its version, without a slash at its
    end."""
    path = path.rstrip("/") or "/"
    if _UNVERSIONED.match(path):
        return f"/v1{path}"
    return path


async def stays() -> Message:
    """Receive callable of a client that never sends or disconnects."""
    await asyncio.Event().wait()
    raise AssertionError


def again(raw: bytes, receive: Receive = stays) -> Receive:
    """A body that was read already, once more, and then what else comes."""
    bodies = [raw]

    async def first() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await receive()

    return first


def check_body(method: str, path: str, headers: dict[bytes, bytes]) -> None:
    """ClientError 415 for a body that is no JSON or not sent as it is: what it would cost is told
    from its bytes. What curl says of `-d` alone passes, unless a browser has said it: those name a
    page."""
    encoding = headers.get(b"content-encoding", b"")
    if encoding.strip().lower() not in PLAIN:
        named = ascii(encoding[:40].decode("latin-1"))
        message = f"Content-Encoding {named} is not supported: send the body as it is"
        raise ClientError(415, "unsupported_encoding", message)
    kind = headers.get(b"content-type", b"application/json")
    if method != "POST" or JSON.fullmatch(kind) or path in FORMS:
        return
    if kind != CURL or b"origin" in headers or b"sec-fetch-site" in headers:
        raise ClientError(415, "unsupported_media_type", "send Content-Type: application/json")


async def until_client_leaves(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def discard(receive: Receive) -> None:
    """Read what a client still sends, within reason, and forget it."""
    rest = MAX_DISCARDED
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while rest > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                rest -= len(message["body"])
    except TimeoutError:
        return


def body_too_large(most: int) -> ClientError:
    message = f"a request body may have {most} bytes (--max-body-size, of files --max-file-size)"
    return ClientError(413, "body_too_large", message)


async def read_body(receive: Receive, most: int) -> bytes:
    """The whole body, without a byte order mark. ClientError 413 when it has more than `most`."""
    whole = bytearray()  # one block of memory, however small the parts are in which it comes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientError(400, "client_left", "the client left before its request was complete")
        whole += message.get("body", b"")
        if len(whole) > most:
            whole.clear()
            if message.get("more_body", False):
                await discard(receive)
            raise body_too_large(most)
        if not message.get("more_body", False):
            return bytes(whole).removeprefix(BOM)
