"""The account of where the time of a request went, as a client reads it; and of requests that ended
lately, their timelines. Those of requests under way are made in running_timelines.py.

Owns the shape of both. Must not know who measures what (telemetry/latency_breakdown.py) or the
rest of an answer.

    accept           from the first byte of the request until it was handed to the engine
    step_under_way   until the engine took it: the step that was running then
    restart          engines that were lost with it: their time, and that of starting the next
    ...              the parts that the engine measured
    delivery         from the end of the last step until the answer was written
    other            what is in none of them
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pageturner.request import Timings
from pageturner.text.output_stream import OutputStream, StreamTimes

MAX_KEPT = 512  # requests whose timelines are kept
MAX_BYTES = 16 << 20  # of all of them
CHOICE_BYTES = 512
SPAN_BYTES = 160  # of each span and name in the account of a choice
OTHERS = "another tenant"

Span = tuple[float, float, str, int]
RequestName = Callable[[int], str | None]  # what a client knows a request by


def parts_of(times: StreamTimes, now: float) -> dict[str, float]:
    """Seconds by part. They add up to the time from its arrival until `now`."""
    timings = times.timings
    if timings is None:
        return {"other": now - times.arrival}
    parts = {"accept": times.submitted_at - times.arrival}
    before = "step_under_way" if times.engines == 1 else "restart"
    parts[before] = timings.received - times.submitted_at
    for part, seconds in timings.parts.items():
        parts[part] = parts.get(part, 0.0) + seconds
    parts["delivery"] = now - timings.until
    return parts | {"other": now - times.arrival - sum(parts.values())}


def report(choice: int, times: StreamTimes, now: float, name: RequestName) -> dict[str, Any]:
    """The `timings` of one choice, in milliseconds."""
    named = times.timings.named if times.timings else ()
    return {
        "index": choice,
        "e2e_ms": _ms(now - times.arrival),
        "ttft_ms": _ms(times.first_at - times.arrival) if times.first_at else None,
        "parts_ms": {part: _ms(seconds) for part, seconds in parts_of(times, now).items()},
        "behind": [{"request": name(by), "part": part, "ms": _ms(s)} for part, by, s in named],
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The part of a request that is kept. name: what its client knows it by; ended_at: its answer
    was written.

    choices  index and times of each; the account of the engine may still be missing in them
    size     bytes, about
    """

    name: str
    ended_at: float
    choices: list[tuple[int, StreamTimes]]
    size: int


def _size(timings: Timings | None) -> int:
    """Bytes of a choice, about; many where its account comes later."""
    if timings is None:
        return CHOICE_BYTES + 64 * SPAN_BYTES
    return CHOICE_BYTES + SPAN_BYTES * (len(timings.spans) + len(timings.named))


class RequestHistory:
    """Requests by what clients know them by: those under way, and the last that ended. Their
    timelines are written when somebody asks: what the engine tells late is then in them. A name may
    be given twice, by two clients of one tenant or of no key at all: neither takes the other's
    place. Where there are too many, or too large ones, the oldest of the tenant that has most is
    forgotten."""

    def __init__(self, most: int = MAX_KEPT, most_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        # engine's id -> name, tenant
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._kept: dict[str, deque[EndedRequest]] = {}  # by tenant, the oldest first
        self._bytes: Counter[str] = Counter()  # by tenant
        self._count = 0

    def begin(self, streams: Iterable[OutputStream], name: str, tenant: str) -> None:
        """A request with these choices is under way."""
        for stream in streams:
            self._names[stream.request.id] = name, tenant
        while len(self._names) > 8 * self._most:
            self._names.popitem(last=False)

    def owner(self, id: int) -> tuple[str, str]:
        """Return what the client knows a request by, and its tenant; "" where that is not known."""
        return self._names.get(id, ("", ""))

    def names(self, tenant: str) -> RequestName:
        """Return how a tenant may know others."""

        def name(id: int) -> str | None:
            known, owner = self._names.get(id, (None, tenant))
            return known if owner == tenant else OTHERS

        return name

    def end(self, streams: Iterable[OutputStream], name: str, tenant: str, now: float) -> None:
        """Keep the timings of a request that ended, for a while."""
        choices = [(stream.choice, stream.times) for stream in streams if stream.done]
        if choices:
            size = sum(_size(times.timings) for _, times in choices)
            one = EndedRequest(name, now, choices, size)
            self._kept.setdefault(tenant, deque()).append(one)
            self._bytes[tenant] += size
            self._count += 1
            if self._count > self._most:
                self._forget(max(self._kept, key=lambda tenant: len(self._kept[tenant])))
            while self._bytes.total() > self._most_bytes:
                self._forget(max(self._bytes, key=self._bytes.__getitem__))

    def _forget(self, tenant: str) -> None:
        """Forget the oldest request of a tenant."""
        kept = self._kept[tenant]
        self._bytes[tenant] -= kept.popleft().size
        self._count -= 1
        if not kept:  # tenants are named by clients: no more are remembered than requests
            del self._kept[tenant], self._bytes[tenant]

    def first_tokens(self, since: float) -> list[float]:
        """Seconds until the first token of requests that ended since then and are remembered."""
        ended = (
            times
            for kept in self._kept.values()
            for one in kept
            if one.ended_at >= since
            for _, times in one.choices
        )
        return [times.first_at - times.arrival for times in ended if times.first_at]

    def find(self, name: str, tenant: str) -> list[dict[str, Any]] | None:
        """The timelines of its choices, of several requests of this name one after another; None
        for what is not there, or not the tenant's."""
        names = self.names(tenant)
        found = []
        for ended in self._kept.get(tenant, ()):
            for choice, times in ended.choices if ended.name == name else ():
                if times.timings is not None:
                    # an engine that was told to abort a stopped request may have gone on behind the
                    # answer
                    end = max(ended.ended_at, times.timings.until)
                    found.append(timeline(choice, times, times.timings, end, names))
        return found or None


def timeline(
    choice: int, times: StreamTimes, timings: Timings, ended_at: float, name: RequestName
) -> dict[str, Any]:
    """The report of a choice, and what it did when: milliseconds since its arrival."""
    spans = spans_of(times, timings, ended_at)
    told = [
        {"start_ms": _ms(start - times.arrival), "end_ms": _ms(end - times.arrival), "what": what}
        | ({"behind": name(by)} if by else {})
        for start, end, what, by in spans
    ]
    return report(choice, times, ended_at, name) | {"spans": told}


def spans_of(times: StreamTimes, timings: Timings, ended_at: float) -> Iterable[Span]:
    """(start, end, what, request because of which or 0) from its arrival until its answer was
    written."""
    submitted = "step_under_way" if times.engines == 1 else "restart"
    return (
        (times.arrival, times.submitted_at, "accept", 0),
        (times.submitted_at, timings.received, submitted, 0),
        *timings.spans,
        (timings.until, ended_at, "delivery", 0),
    )
