"""One request as everybody passes it on who has to do with it: its id, whose it is, and its line in the log.

Owns what of a request is logged: figures and names, and never a prompt, an answer or a key. Must not know how
a request is admitted (middleware.py) or answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from pageturner.http.api_keys import ANYBODY, ApiKey
from pageturner.text.output_stream import OutputStream

log = logging.getLogger("pageturner")

MOST_PATH = 128  # characters of a path
CLIENT_LEFT = 499  # the status of a request that was not answered
TEXT_NAMES = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "recomputed_tokens": "recomputed",
    "output_tokens": "output",
    "ttft_seconds": "ttft",
    "finish_reason": "finish",
}
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
    model   that answers, and the choices of its answer, where it generates
    release_body  tells the connection that its body is not kept any more
    """

    id: str
    tenant: str = ""
    status: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    abort_reason: str = ""
    key: ApiKey = ANYBODY
    model: str = ""
    streams: list[OutputStream] = field(default_factory=list)
    release_body: Callable[[], None] = field(default=lambda: None)

    def add_answer(self, streams: Iterable[OutputStream]) -> None:
        """Tokens and times of a generating request."""
        self.streams = streams = list(streams)
        prompt = sum(len(stream.request.prompt) for stream in streams)
        output = sum(len(stream.tokens) for stream in streams)
        cached = sum(stream.cached for stream in streams)
        again = sum(stream.recomputed for stream in streams)
        begun = [stream.times for stream in streams if stream.tokens]
        first = min((times.first_at - times.arrival for times in begun), default=0.0)
        ends = ",".join(stream.finish or "unfinished" for stream in streams[:8])
        self.about = {"prompt_tokens": prompt, "cached_tokens": cached, "recomputed_tokens": again}
        self.about |= {
            "output_tokens": output,
            "ttft_seconds": round(first, 6),
            "finish_reason": ends,
        }

    def log_level(self, path: str, watching: Collection[str]) -> int:
        """Of its line: `debug` for those who only watch, unless they learn of a failure.

        watching  paths of health and metrics
        """
        quiet = is_watching(path, watching) and self.status < 500
        return logging.DEBUG if quiet else logging.INFO

    def write(self, level: int, method: str, path: str, seconds: float) -> None:
        """Its line in the log, when it has ended after so many seconds."""
        path, status = path[:MOST_PATH], self.status or CLIENT_LEFT
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
    """Whether who asks for that only watches. watching: paths of health and metrics."""
    return path in watching or path == LIVE


def _text(value: object) -> str:
    return f"{value:.3f}s" if isinstance(value, float) else str(value)
