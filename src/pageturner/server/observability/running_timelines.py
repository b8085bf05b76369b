"""The account of where the time of a request went so far, while it is under way, and who was in its
way.

Owns how the engine is asked for an account that is not closed, and what is told where none comes.
It is asked over the ledger, and answers with its next figures, which come four times a second: so
whoever looks costs it one copy of an account in each of them, and who does not look nothing. Must
not know who measures what (telemetry/latency_breakdown.py), nor the timelines of what has ended
(timings.py).

    held             no engine has it yet: there is none, or suspects of a crash are tried first
    step_under_way   the engine has it, and has not come to it since: the step that runs is in its
                     way
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http.responses import json_response
from pageturner.request import Timings
from pageturner.server.observability.admin_state import place_of
from pageturner.server.observability.timings import MAX_KEPT, RequestName, timeline
from pageturner.server.service import Service
from pageturner.text.output_stream import OutputStream

ASKED_FOR = 2.0  # seconds behind each look for which the engine tells the account
PATIENCE = 1.0  # seconds that a look waits for the first one
TICK = 0.02
MAX_CHOICES = 8  # of what has one name are told: as many as the ledger asks for
MAX_BEHIND = 8


class TimelinePages:
    """GET /v1/requests/ID/timeline of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def timeline(self, request: HTTPRequest) -> Response:
        name, tenant = request.path_params["id"], request.scope["pageturner"].tenant
        history = self._service.history
        under_way = await self._running(name, tenant)  # first: it may end while it is asked for
        told = [*(history.find(name, tenant) or ()), *under_way]
        if not told:
            raise ClientError(
                404,
                "unknown_request",
                f"no request {name[:128]!r} is under way or remembered: of those that ended the last"
                f" {MAX_KEPT} are, by X-Request-Id",
            )
        return json_response({"id": name, "choices": told})

    async def _running(self, name: str, tenant: str) -> list[dict[str, Any]]:
        """The timelines of what is under way by this name and is this tenant's, the oldest
        first."""
        service = self._service
        found = [
            stream
            for id, stream in service.streams.unfinished.items()
            if service.history.owner(id) == (name, tenant)
        ][:MAX_CHOICES]
        now = time.monotonic()
        for stream in found:
            service.supervisor.process.ledger.ask(stream.request.id, now + ASKED_FOR)
        while time.monotonic() < now + PATIENCE and any(map(self._awaited, found)):
            await asyncio.sleep(TICK)
        names = service.history.names(tenant)
        return [self._told(stream, names) for stream in found if not stream.done]

    def _awaited(self, stream: OutputStream) -> bool:
        return not stream.done and stream.request.id not in self._service.streams.accounts

    def _told(self, stream: OutputStream, name: RequestName) -> dict[str, Any]:
        """The same as `timeline` has, up to the engine's last word: `so_far_ms` since it came."""
        id, times = stream.request.id, stream.times
        given, in_step = self._service.supervisor.placed()
        account = self._service.streams.accounts.get(id)
        timings = account or self._unheard(stream, id in given)
        times = replace(times, timings=timings, submitted_at=times.submitted_at or timings.received)
        told = timeline(stream.choice, times, timings, timings.until, name)
        told["so_far_ms"] = told.pop("e2e_ms")
        told["parts_ms"] = {part: value for part, value in told["parts_ms"].items() if value}
        told["spans"] = [span for span in told["spans"] if span["what"] != "delivery"]
        state = place_of(id, given, in_step)
        if (
            state == "waiting" and not told["behind"]
        ):  # no single one is to blame: those that are computed now
            part, others = told["spans"][-1]["what"], [name(other) for other in sorted(in_step)]
            told["behind"] = [
                {"request": one, "part": part, "ms": None} for one in others[:MAX_BEHIND]
            ]
        return told | {"unfinished": True, "state": state}

    def _unheard(self, stream: OutputStream, given: bool) -> Timings:
        """Return the timings of a stream about which the engine has reported nothing yet."""
        now, times = time.monotonic(), stream.times
        if given:
            return Timings(now, now, {}, (), ())
        since = times.submitted_at or times.arrival
        return Timings(since, now, {"held": now - since}, ((since, now, "held", 0),), ())
