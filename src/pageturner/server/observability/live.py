"""`/v1/live`: the batch while it is computed, for the page at `/`.

Owns who may look and what is told: steps, requests and figures, and nothing of what was said. Must
not know how the page draws them. While somebody asks the engine notes its steps (ledger.py); nobody
asks, it does not.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http.responses import json_response
from pageturner.http.web_pages import home_page
from pageturner.ipc.ledger import NotedStep
from pageturner.server.observability.admin_state import AdminPages, described
from pageturner.server.service import Service
from pageturner.text.output_stream import OutputStream

WATCHED_FOR = 3.0  # seconds behind each look for which the engine notes its steps
MAX_REQUESTS = 256  # are told, the oldest first: as many as a noted step has rows
LATELY = 60.0  # seconds of ended requests whose first tokens are counted
MAX_NUMBER = 1 << 53


class LivePage:
    """admin: asked for its key where there are keys at all."""

    def __init__(self, service: Service, admin: AdminPages) -> None:
        self._service = service
        self._admin = admin

    async def home(self, _: HTTPRequest) -> Response:
        return home_page(self._admin.rule_of_page())

    async def live(self, request: HTTPRequest) -> Response:
        service = self._service
        if service.keys.needed or service.config.admin_key:
            self._admin.admit(request)
        since = _number(request.query_params.get("since", "0"))
        ledger, now = service.supervisor.process.ledger, time.monotonic()
        ledger.watch(now + WATCHED_FOR)
        return json_response(
            {
                "epoch": service.supervisor.epoch,
                "now_s": round(now, 4),
                "steps": [_step(step) for step in ledger.noted(since)],
                "requests": [
                    about | {"ttft_s": _first_token(stream)}
                    for stream, about in described(service, MAX_REQUESTS, now)
                ],
                "unfinished": len(service.streams.unfinished),
                "first_tokens_ms": [
                    round(1000 * s, 1) for s in service.history.first_tokens(now - LATELY)
                ],
                "figures": self._figures(now),
                "settings": service.live_settings.as_dict(),
            }
        )

    def _figures(self, now: float) -> dict[str, float]:
        """The engine's own, and what is counted here: names as in `Stats`."""
        service, metrics = self._service, self._service.metrics
        ready = service.supervisor.ready
        share, rate = metrics.goodput.last_minute(now)
        figures = {name: value for name, value in metrics.engine.items() if isfinite(value)}
        shares = metrics.utilisation.lately.shares(metrics.utilisation.limits)
        figures |= {f"share_{resource}": value for resource, value in shares.items()}
        figures |= {"goodput_share": share, "goodput_rate": rate}
        return figures | {"block_size": float(ready.block_size if ready is not None else 0)}


def _first_token(stream: OutputStream) -> float | None:
    times = stream.times
    return round(times.first_at - times.arrival, 3) if times.first_at else None


def _step(step: NotedStep) -> dict[str, Any]:
    rows = [[id, n, int(prompt)] for id, n, prompt in step.rows]
    ended = round(step.ended, 4) if isfinite(step.ended) else 0.0
    return {"number": step.number, "begun_s": round(step.begun, 4), "ended_s": ended, "rows": rows}


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > MAX_NUMBER:
        raise ClientError(400, "invalid_value", "since is the number of a step: digits", "since")
    return int(text)
