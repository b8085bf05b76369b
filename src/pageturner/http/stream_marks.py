"""Marks within a stream of server-sent events, or of lines of JSON, by which a router knows how far
an answer is.

Owns their bytes, which servers write (server/stream_migration.py) and routers take out
(router/stream_copy.py). To any other reader they are comments. Standard library and msgspec only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOVES = b"x-pageturner-moves"  # a router's header: it takes marks out again
RESUME = "/v1/streams/resume"
MARK = b":pt "
BEGIN = MARK + b"begin "
ALIVE = MARK + b"alive\n\n"  # behind what belongs to no token yet: it may be passed on
LEAVING = MARK + b"leaving\n\n"  # the server is drained: have the stream go on elsewhere


class StreamBeginning(msgspec.Struct, omit_defaults=True):
    """The beginning of an answer. fingerprint: of the engine that computes it; seed: of its noise;
    created: the second that it says of itself; items: the conversation as JSON, where the request
    names parts of it that only its server keeps (/v1/responses)."""

    fingerprint: str
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    created: Annotated[int, Meta(ge=0, le=2**53)]
    items: str = ""


def token_mark(token: int) -> bytes:
    """Return the mark that stands behind the events of this token."""
    return b":pt %d\n\n" % token
