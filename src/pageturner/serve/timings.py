"""Where the time of a request went, as a client reads it; and of requests that ended lately, their timelines.

Owns the shape of both. Must not know who measures what (observe/latency_breakdown.py) or the
rest of an answer.

    accept           from the first byte of the request until it was handed to the engine
    step_under_way   until the engine took it: the step that was running then
    restart          engines that were lost with it: their time, and that of starting the next
    ...              the parts that the engine measured
    delivery         from the end of the last step until the answer was written
    other            what is in none of them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.core.types import Timings
from pageturner.errors import ClientError
from pageturner.text.output_stream import OutputStream

MOST_KEPT = 512  # requests whose timelines are kept
OTHERS = "another tenant"

Name = Callable[[int], str | None]  # what a client knows a request by


def parts_of(stream: OutputStream, now: float) -> dict[str, float]:
    """Seconds by part. They add up to the time from its arrival until `now`."""
    timings = stream.timings
    if timings is None:
        return {"other": now - stream.arrival}
    parts = {"accept": stream.submitted_at - stream.arrival}
    before = "step_under_way" if stream.engines == 1 else "restart"
    parts[before] = timings.received - stream.submitted_at
    for part, seconds in timings.parts.items():
        parts[part] = parts.get(part, 0.0) + seconds
    parts["delivery"] = now - timings.until
    return parts | {"other": now - stream.arrival - sum(parts.values())}


def report(stream: OutputStream, now: float, name: Name) -> dict[str, Any]:
    """The `timings` of one choice, in milliseconds."""
    named = stream.timings.named if stream.timings else ()
    return {
        "index": stream.choice,
        "e2e_ms": _ms(now - stream.arrival),
        "ttft_ms": _ms(stream.first_at - stream.arrival) if stream.tokens else None,
        "parts_ms": {part: _ms(seconds) for part, seconds in parts_of(stream, now).items()},
        "behind": [{"request": name(by), "part": part, "ms": _ms(s)} for part, by, s in named],
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


class History:
    """Requests by what clients know them by: those under way, and the last that ended."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()  # engine's id -> name, tenant
        self._kept: OrderedDict[str, tuple[str, list[dict[str, Any]]]] = OrderedDict()

    def begin(self, streams: Iterable[OutputStream], name: str, tenant: str) -> None:
        """A request with these choices is under way."""
        for stream in streams:
            self._names[stream.request.id] = name, tenant
        while len(self._names) > 8 * self._most:
            self._names.popitem(last=False)

    def names(self, tenant: str) -> Name:
        """How a tenant may know others."""

        def name(id: int) -> str | None:
            known, owner = self._names.get(id, (None, tenant))
            return known if owner == tenant else OTHERS

        return name

    def end(self, streams: Iterable[OutputStream], name: str, tenant: str, now: float) -> None:
        """It ended; what it said stays for a while."""
        told = [timeline(stream, now, self.names(tenant)) for stream in streams if stream.timings]
        if told:
            self._kept[name] = tenant, told
            self._kept.move_to_end(name)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def find(self, name: str, tenant: str) -> list[dict[str, Any]] | None:
        """The timelines of its choices; None for what is not there, or not the tenant's."""
        owner, told = self._kept.get(name, ("", None))
        return told if owner == tenant else None


def timeline(stream: OutputStream, now: float, name: Name) -> dict[str, Any]:
    """The report of a choice, and what it did when: milliseconds since its arrival."""
    timings = stream.timings or Timings(stream.arrival, now, {})
    before = [(stream.arrival, stream.submitted_at, "accept", 0)]
    before += [
        (stream.submitted_at, timings.received, "step_under_way" if stream.engines == 1 else "restart", 0)
    ]
    after = [(timings.until, now, "delivery", 0)]
    spans = [
        {"start_ms": _ms(start - stream.arrival), "end_ms": _ms(end - stream.arrival), "what": what}
        | ({"behind": name(by)} if by else {})
        for start, end, what, by in (*before, *timings.spans, *after)
    ]
    return report(stream, now, name) | {"spans": spans}


def timeline_page(history: History) -> Callable[[HTTPRequest], Awaitable[Response]]:
    """GET /v1/requests/ID/timeline."""

    async def page(request: HTTPRequest) -> Response:
        name = request.path_params["id"]
        told = history.find(name, request.scope["pageturner"].tenant)
        if told is None:
            message = f"no finished request {name!r} is remembered: the last {MOST_KEPT} are, by X-Request-Id"
            raise ClientError(404, "unknown_request", message)
        body = msgspec.json.encode({"id": name, "choices": told})
        return Response(body, media_type="application/json")

    return page
