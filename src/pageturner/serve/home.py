"""The page at `/`: a chat, and figures of the engine beside it.

Owns where the page lies and its headers. Must not know what the page shows: it asks the API, as any client.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.serve.openapi import page_headers

HOME = Path(__file__).with_name("home.html")


async def home(_: HTTPRequest) -> Response:
    """The page. Its policy lets nothing run but its own script, and nothing be fetched but from here."""
    page = HOME.read_bytes()
    return Response(page, headers=page_headers(page), media_type="text/html")
