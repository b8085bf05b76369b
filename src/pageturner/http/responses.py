"""Small answers that server and router give alike: JSON, server-sent events, and pages for a
browser.

Owns their headers. Must not know what they say.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import pageturner

_LINE_ENDS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")  # beside \n, for str.splitlines


def encode(value: Any) -> bytes:
    """Return JSON that is one line to every client: those in Python that split by all line ends of
    Unicode find none, as in what Go writes."""
    made = msgspec.json.encode(value)
    if made.isascii():
        return made
    return _LINE_ENDS.sub(lambda end: b"\\u%04x" % ord(end[0].decode()), made)


def json_response(value: Any) -> Response:
    """Return the answer of a small endpoint."""
    return Response(encode(value), media_type="application/json")


async def ping(_: HTTPRequest) -> Response:
    return Response()


async def version(_: HTTPRequest) -> Response:
    return json_response({"version": pageturner.__version__})


def sse_event(body: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + body + b"\n\n"


def page_headers(page: bytes) -> dict[str, str]:
    """Return headers under which a browser runs nothing but the page's own script and style, and
    fetches only from here."""
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    for name in ("script", "style"):
        inside = re.search(rf"<{name}>(.*?)</{name}>".encode(), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside[1] if inside else b"").digest()).decode()
        policy.append(f"{name}-src 'sha256-{digest}'")
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def html_response(page: bytes) -> Response:
    """Return a page whose script and style stand in the page itself."""
    return Response(page, headers=page_headers(page), media_type="text/html")
