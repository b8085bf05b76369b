"""The page at `/`: a chat, and beside it what the engine does.

Owns where its parts lie, how they become one document, and its headers. Must not know what the page
shows: it asks the API, as any client.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.http.responses import html_response

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("markdown.js", "chat.js", "live.js")  # one behind the other, in one scope


@cache
def document() -> bytes:
    """The page with its style and its scripts inside, so that one hash of each is all that may
    run."""
    text = (PARTS / "index.html").read_text()
    style = (PARTS / "style.css").read_text()
    script = "\n".join((PARTS / name).read_text() for name in SCRIPTS)
    return text.replace("{{style}}", style).replace("{{script}}", script).encode()


async def home(_: HTTPRequest) -> Response:
    """The page. Its policy lets nothing run but its own script, and nothing be fetched but from
    here."""
    return html_response(document())
