"""The body of an upload, read piece by piece: multipart/form-data (RFC 7578).

Owns its syntax and the bounds of all parts but the file. Must not know what the fields mean, nor
where the file goes. Only /v1/files takes such bodies.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.types import Receive

from pageturner.errors import ClientError

MAX_HEAD = 8 * 1024  # bytes of the headers of a part
MAX_FIELD = 4 * 1024  # bytes of a part that is no file
MAX_PARTS = 16
_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.I
)
_NAME = re.compile(r"""[;\s]name="((?:[^"\\]|\\.)*)\"""")
_FILENAME = re.compile(r"""[;\s]filename="((?:[^"\\]|\\.)*)\"""")

Take = Callable[[bytes], Awaitable[None]]


def boundary_of(content_type: str) -> bytes:
    """ClientError 415 for anything but multipart/form-data with a boundary."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        message = "send the file as multipart/form-data, with the fields purpose and file"
        raise ClientError(415, "unsupported_media_type", message)
    return (found[1] or found[2]).encode("latin-1")


async def read_form(
    receive: Receive, boundary: bytes, take: Take
) -> tuple[dict[str, str], str | None]:
    """The fields of a form, and the name of its file; the bytes of the part `file` go to `take` as
    they come. The name is None where there was no file. ClientError for what is no such form."""
    form = _Form(receive, b"\r\n--" + boundary)
    fields: dict[str, str] = {}
    filename: str | None = None
    await form.skip_preamble()
    for _ in range(MAX_PARTS):
        head = await form.head()
        if head is None:
            return fields, filename
        name, given = _quoted(_NAME, head), _quoted(_FILENAME, head)
        if name == "file" and filename is None:
            filename = given or "file"
            async for piece in form.content():
                await take(piece)
            continue
        content = b""
        async for piece in form.content():
            content += piece
            if len(content) > MAX_FIELD:
                raise _invalid(f"a field has at most {MAX_FIELD} bytes", name)
        fields[name or ""] = content.decode("utf-8", "replace")
    raise _invalid(f"a form has at most {MAX_PARTS} parts")


def _quoted(pattern: re.Pattern[str], head: str) -> str | None:
    disposition = next(
        (line for line in head.split("\r\n") if line.lower().startswith("content-disposition:")), ""
    )
    found = pattern.search(disposition)
    return None if found is None else re.sub(r"\\(.)", r"\1", found[1])


class _Form:
    """The bytes of a form: `mark` stands between two parts, with a line break before it."""

    def __init__(self, receive: Receive, mark: bytes) -> None:
        self._receive, self._mark = receive, mark
        self._held = bytearray(b"\r\n")  # so that the first mark looks like the others
        self._more = True

    async def _read(self) -> None:
        if not self._more:
            raise _invalid("the form ends before its last boundary")
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientError(400, "client_left", "the client left before its request was complete")
        self._held += message.get("body", b"")
        self._more = message.get("more_body", False)

    async def skip_preamble(self) -> None:
        async for _ in self.content():
            pass

    async def content(self) -> AsyncIterator[bytes]:
        """Up to the next mark, which is taken away too."""
        while True:
            place = self._held.find(self._mark)
            if place >= 0:
                yield bytes(self._held[:place])
                del self._held[: place + len(self._mark)]
                return
            if (safe := len(self._held) - len(self._mark)) > 0:
                yield bytes(self._held[:safe])
                del self._held[:safe]
            await self._read()

    async def head(self) -> str | None:
        """Return the headers of the part after a boundary; None after the last boundary."""
        while len(self._held) < 2:
            await self._read()
        if self._held[:2] == b"--":
            return None
        while (place := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > MAX_HEAD:
                raise _invalid(f"the headers of a part have at most {MAX_HEAD} bytes")
            await self._read()
        head = bytes(self._held[:place]).decode("utf-8", "replace")
        del self._held[: place + 4]
        return head


def _invalid(message: str, param: str | None = None) -> ClientError:
    return ClientError(400, "invalid_form", message, param)
