"""The requests that a router passes on to a replica, which headers, in both directions, and how an
error of a replica is read.

Owns the list of paths, and of headers that are meant for neighbours. Must not know how a request is
passed on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.types import Scope

from pageturner.errors import ClientError
from pageturner.http import http_client
from pageturner.http.decoding import decoded
from pageturner.http.http_client import Headers
from pageturner.http.request_info import ELAPSED
from pageturner.http.stream_marks import MOVES, STREAMED
from pageturner.router.request_hints import DigestPrefix, no_prefix, prefix_digests

STREAMS = (
    b"text/event-stream",
    b"application/x-ndjson",
)  # answers that can say in the end that they broke off
# between two neighbours only (RFC 9110, 7.6.1); what is written anew; the Origin, which the router
# has judged
HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"expect",
        b"date",
        b"x-request-id",
        b"origin",
        ELAPSED,
        MOVES,
    }
)


def forwarded_headers(scope: Scope) -> Headers:
    """Return the request headers for a replica. Raises ClientError 400 for bytes that may not be in
    a header."""
    headers = [
        (name, value) for name, value in kept_headers(scope["headers"]) if name != b"content-length"
    ]
    for name, value in headers:
        if not http_client.is_header(name, value):
            message = f"the header {name[:40]!a} has bytes that may not be in a header"
            raise ClientError(400, "invalid_header", message)
    return headers


def kept_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the end-to-end headers, without the hop-by-hop headers."""
    headers = list(headers)
    named = b",".join(value for name, value in headers if name == b"connection").lower()
    dropped = HOP | {name.strip() for name in named.split(b",")}
    return [(name, value) for name, value in headers if name not in dropped]


def is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(STREAMS) for name, value in headers)


class ToldError(msgspec.Struct):
    """An error as its receiver reads it."""

    message: str = ""
    reason: str = ""


class _ErrorBody(msgspec.Struct):
    """An error of any shape: Ollama's has its reason beside the sentence."""

    error: ToldError | str
    reason: str = ""


def told_error(body: bytes) -> ToldError:
    """Return the error in the body of an answer; an empty one where there is none."""
    found = decoded(body, _ErrorBody)
    if found is None:
        return ToldError()
    if isinstance(found.error, str):
        return ToldError(found.error, found.reason)
    return found.error


_ANYWHERE = (
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/reranking",
    "/v2/rerank",
    "/v1/score",
    "/infill",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)
# of a model, and of any replica that has it; the lists of models: model_lists.py
_PAGES = ("/api/version", "/api/ps", "/v1/models/{id:path}", "/props", "/tokenizer_info")
RELAYED: tuple[tuple[str, str, DigestPrefix], ...] = (
    # what begins as its earlier requests began goes where those went
    *(("POST", path, prefix_digests) for path in STREAMED),
    *(("POST", path, no_prefix) for path in _ANYWHERE),
    *(("GET", path, no_prefix) for path in _PAGES),
)
