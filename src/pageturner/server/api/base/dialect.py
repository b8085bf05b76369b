"""The interface of an API shape: how its requests are read and its answers written.

Each shape is one file that makes one Dialect (completions.py, chat.py), and a route of the
application. Must not know any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pageturner.errors import ClientError
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import RequestBody, decode
from pageturner.server.api.base.call import Reader
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai.openai_streams import ended_stream, failed_stream
from pageturner.text.output_stream import OutputPiece, OutputStream

SERVER_SENT_EVENTS = b"text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which no client takes for anything


def no_chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """Write no chunk: embeddings and scores are not streamed."""
    return b""


def no_end(reply: Reply, streams: list[OutputStream]) -> bytes:
    """Write no end: the last event or line has said that it is the last."""
    return b""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One shape of an API.

    id_prefix  begins the ids of its answers, in front of a `separator`; its name, too
    shape      what all events and bodies of its answers have in common
    read       the fields of a request become a call; ClientError names the field that is wrong
    whole      the body of an answer that is not streamed, in parts
    chunk      the server-sent events that one piece of a streamed answer becomes
    begin      what can be written before there is a token; `chunk` does not write it again
    alive      what says, every few seconds until the first token, that an answer is under way
    long_chunk the same as `chunk` in parts, for a piece that brings many logprobs of a prompt;
               None: it tells none
    failed     the last bytes of a streamed answer that fails in the middle
    end        the last bytes of one that does not, behind those of its last piece
    media_type of a streamed answer
    decode     the JSON of a request as fields, within limits; one with other names for them
               translates here

    How its errors look before an answer has begun is in error_responses.py: they may come before
    anybody knows which dialect is spoken.
    """

    id_prefix: str
    shape: ReplyShape
    read: Reader
    whole: Callable[[Reply, list[OutputStream], WholeAnswer], InParts[bytes]]
    chunk: Callable[[Reply, OutputPiece], bytes] = no_chunk
    long_chunk: Callable[[Reply, OutputPiece], InParts[bytes]] | None = None
    begin: Callable[[Reply, OutputStream], bytes] = lambda reply, stream: KEEP_ALIVE
    alive: bytes = KEEP_ALIVE
    failed: Callable[[Reply, ClientError], bytes] = failed_stream
    end: Callable[[Reply, list[OutputStream]], bytes] = ended_stream
    media_type: bytes = SERVER_SENT_EVENTS
    separator: str = "-"
    decode: Callable[[bytes, RequestLimits], RequestBody] = decode
