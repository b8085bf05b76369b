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
RESPONSES = "/v1/responses"  # its streams move, too, and are kept where they end
# the other paths whose streams move: one prompt, and an answer of one choice
STREAMED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)


class StreamBeginning(msgspec.Struct, omit_defaults=True):
    """The beginning of an answer. fingerprint: of the engine that computes it; seed: of its noise;
    created: the second that it says of itself; items: the conversation as JSON, where the request
    names parts of it that only its server keeps (/v1/responses)."""

    fingerprint: str
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    created: Annotated[int, Meta(ge=0, le=2**53)]
    items: str = ""


class MovedStream(msgspec.Struct, forbid_unknown_fields=True):
    """The body of RESUME. path, body: the request as it first came; tokens: of its answer so far;
    begun: what the first server said of it; told: that, too, what stands before the first token."""

    path: str
    body: str
    begun: StreamBeginning
    tokens: list[Annotated[int, Meta(ge=0)]]
    told: bool = False


def token_mark(token: int) -> bytes:
    """Return the mark that stands behind the events of this token."""
    return b":pt %d\n\n" % token
