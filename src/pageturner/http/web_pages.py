"""The pages for a browser: the chat and the view of the engine at `/`, and `/docs`.

Owns where their parts lie and how these become one document. Must not know what a page shows: it
asks the API, as any client does. Router and server have the same pages, and reports share the
design.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

from starlette.responses import Response

from pageturner.http.responses import html_response

PARTS = Path(__file__).with_name("page")
HOME = (
    "markdown",
    "highlight",
    "common",
    "conversations",
    "chat",
    "batch",
    "engine",
    "fleet",
    "start",
)
SCRIPTS = {"home": HOME, "docs": ("docs",)}  # one behind the other, in one scope


def _part(name: str) -> str:
    return (PARTS / name).read_text()


def design() -> str:
    """Return the style that all pages share."""
    return _part("design.css")


@cache
def document(name: str) -> str:
    """Return a page with its style and its scripts inside, so that one hash of each is all that a
    browser may run."""
    script = "\n".join(_part(f"{one}.js") for one in SCRIPTS[name])
    text = _part(f"{name}.html").replace("{{style}}", design() + _part(f"{name}.css"))
    return text.replace("{{script}}", script)


def home_page(settings: str) -> Response:
    """Return the page at `/`. settings: "key" where the admin key may change the settings, "open
    KEY" where this page may, or else the sentence why nobody may."""
    return html_response(document("home").replace("{{settings}}", escape(settings), 1).encode())


def docs_page() -> Response:
    """Return the page that shows the OpenAPI document of the program from which it comes."""
    return html_response(document("docs").encode())
