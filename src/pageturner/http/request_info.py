"""One request as everybody passes it on who has to do with it: its id, whose it is, and its line in
the log.

Owns what of a request is logged: figures and names, and never a prompt, an answer or a key. Must
not know how a request is admitted (middleware.py) or answered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pageturner.http.api_keys import ANYBODY, ApiKey

log = logging.getLogger("pageturner")

MAX_PATH = 128  # characters of a path
CLIENT_LEFT = 499  # the status of a request that was not answered
TEXT_NAMES = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "recomputed_tokens": "recomputed",
    "output_tokens": "output",
    "ttft_seconds": "ttft",
    "finish_reason": "finish",
}
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_ELAPSED_MS = 86_400_000.0  # a day
ELAPSED = b"x-elapsed-ms"  # milliseconds for which a router had the request: its client has waited for them
LIVE = "/v1/live"  # for which the page asks all the time
TRACE = "pageturner.trace"  # in the scope of a request that is traced: its RequestTrace


@dataclass(slots=True)
class RequestInfo:
    """One request: its id, whose it is, and what its log line will say.

    id      as the client gave it, in its body or before it, or a new one
    tenant  whose key it came with, "" where keys do not tell tenants apart
    status  of its answer, 0 before that begins
    about   more for the log line, by names as in `TEXT_NAMES`
    abort_reason  why the answer was cut off, "" where it was not
    key     what it came with
    model   that answers, where the request generates
    streams  the choices of its answer, which only the server that makes them understands
    release_body  tells the connection that its body is not kept any more
    """

    id: str
    tenant: str = ""
    status: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    abort_reason: str = ""
    key: ApiKey = ANYBODY
    model: str = ""
    streams: list[Any] = field(default_factory=list)
    release_body: Callable[[], None] = field(default=lambda: None)

    def log_level(self, path: str, watching: Collection[str]) -> int:
        """Return the level of its log line: `debug` for those who only watch, unless they learn of
        a failure.

        watching  paths of health and metrics
        """
        quiet = is_watching(path, watching) and self.status < 500
        return logging.DEBUG if quiet else logging.INFO

    def write(self, level: int, method: str, path: str, seconds: float) -> None:
        """Its line in the log, when it has ended after so many seconds."""
        path, status = path[:MAX_PATH], self.status or CLIENT_LEFT
        about = "".join(
            f" {TEXT_NAMES.get(name, name)}={_text(value)}"
            for name, value in self.about.items()
            if name != "recomputed_tokens" or value
        )
        fields = {"request_id": self.id, "method": method, "path": path, "status": status}
        fields |= {"seconds": round(seconds, 6), **self.about}
        fields |= {"model": self.model} if self.model else {}
        fields |= {"tenant": self.tenant} if self.tenant else {}
        fields |= {"aborted": self.abort_reason} if self.abort_reason else {}
        log.log(
            level,
            "%s %s %s %s %.3fs%s%s",
            self.id,
            method,
            ascii(path),
            status,
            seconds,
            about,
            f" ({self.abort_reason})" if self.abort_reason else "",
            extra={"fields": fields},
        )


def is_watching(path: str, watching: Collection[str]) -> bool:
    """Return whether a request only monitors the server. watching: paths of health and metrics."""
    return path in watching or path == LIVE


def _text(value: object) -> str:
    return f"{value:.3f}s" if isinstance(value, float) else str(value)


def is_safe_id(value: str) -> bool:
    """Return whether this can be an id: it becomes part of paths, headers and the log."""
    return SAFE_ID.fullmatch(value) is not None


def elapsed_of(header: bytes | None) -> float:
    """Return the seconds for which a client has waited already, as the header of a router says; 0
    where the header says nothing valid. A client that makes up a number only has less time."""
    try:
        waited = float((header or b"0").decode("latin-1"))
    except ValueError:
        return 0.0
    return waited / 1000 if 0 <= waited <= MAX_ELAPSED_MS else 0.0
