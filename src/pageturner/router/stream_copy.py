"""The copy that a router keeps of a stream that it passes on: enough to have another replica go on
with it.

Owns the marks that it takes out of the bytes, and the request by which a stream is moved
(stream_marks.py has the form of both). Must not know replicas or connections. Bytes behind the last
mark are held until the next one, so that a client never has half of what a token adds; marks come
in the same write as their events.
"""

from __future__ import annotations

import re

import msgspec

from pageturner.http.decoding import UNREADABLE, decoded
from pageturner.http.stream_marks import BEGIN, RESPONSES, STREAMED, MovedStream, StreamBeginning

MAX_BODY = 1 << 20  # bytes of a request; a longer one is not kept, and its stream cannot move
MAX_HELD = 1 << 20  # bytes without a mark; what is longer is passed on, and cannot move meanwhile
LONGEST_MARK = len(b":pt 4294967295\n\n")  # of those behind the first
_MARK = re.compile(rb"^:pt (?:begin ([^\n]*)|(\d{1,10})|(leaving)|alive)\n\n", re.MULTILINE)


class _Streamed(msgspec.Struct):
    stream: bool = False


class StreamCopy:
    """One stream. tokens: those whose events were passed on; told: so was what stands before them;
    leaving: its replica wants it to go on elsewhere."""

    def __init__(self, path: str, body: bytes) -> None:
        self.tokens: list[int] = []
        self.told = self.leaving = False
        self._path, self._body = path, body
        self._begun: StreamBeginning | None = None
        self._held = b""
        self._plain = False
        self._torn = False  # a part of what a token adds was passed on

    @property
    def movable(self) -> bool:
        """Return whether another replica could resume the stream."""
        return self._begun is not None and not self._plain and not self._torn

    @property
    def waits(self) -> bool:
        """Return whether its first token is still to come, as far as the marks tell."""
        return self.movable and not self.tokens

    def feed(self, piece: bytes) -> bytes:
        """Return what of the stream can be passed on, with this piece of it."""
        held = self._held + piece
        if self._plain:
            self._held = b""
            return held
        if self._begun is None and not held.startswith(BEGIN[: len(held)]):
            self._plain, self._held = True, b""
            return held
        out, behind = [], 0
        for mark in _MARK.finditer(held):
            out.append(held[behind : mark.start()])
            behind = mark.end()
            self._take(mark)
        self._held = held[behind:]
        if len(self._held) > MAX_HELD:
            out.append(self._held[:-LONGEST_MARK])
            self._held = self._held[-LONGEST_MARK:]
            self._torn = True
            self._plain = self._plain or self._begun is None
        return b"".join(out)

    def _take(self, mark: re.Match[bytes]) -> None:
        beginning, token, leaving = mark.groups()
        if beginning is not None:
            self._begun = decoded(beginning, StreamBeginning)
            self._plain = self._plain or self._begun is None
        elif leaving is not None:
            self.leaving = True
        else:
            self._torn = False
            if token is None:
                self.told = True
            else:
                self.tokens.append(int(token))

    def rest(self) -> bytes:
        """Return what is held, of a stream that has ended."""
        held, self._held = self._held, b""
        return held

    def lost(self) -> None:
        """Drop everything after the last mark of a lost replica: the next replica will send it
        again."""
        self._held, self.leaving = b"", False

    def request(self) -> bytes:
        """The body of the request by which another replica goes on."""
        assert self._begun is not None
        return msgspec.json.encode(
            MovedStream(self._path, self._body.decode(), self._begun, self.tokens, self.told)
        )


def copy_of(method: str, path: str, body: bytes) -> StreamCopy | None:
    """Return a copy of the stream that may answer this request; None where it could not move."""
    if method != "POST" or path not in (*STREAMED, RESPONSES) or len(body) > MAX_BODY:
        return None
    try:
        body.decode()
        if path == RESPONSES and not msgspec.json.decode(body, type=_Streamed).stream:
            return None  # a server that is drained finishes it: perhaps it alone can
    except UNREADABLE:
        return None
    return StreamCopy(path, body)
