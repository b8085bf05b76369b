"""Traces: of each request one span, and below it what the request did when, for a collector of
OpenTelemetry.

Owns the span of a request, and that a collector that is slow or gone hurts nobody: spans wait in a
bounded queue for a thread of their own. Must not know how requests are answered: what a server
knows of an answer it gives as a `SpanSource`. OpenTelemetry is an extra, which is imported where
traces are wanted, and nowhere else.

What goes on without the request that asked for it (a response in the background, a line of a batch)
has a span of the same form: a child of that request where it came with a `traceparent`, else the
root of a trace of its own, with a link to the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import pageturner
from pageturner.errors import bad_setting
from pageturner.http.request_info import CLIENT_LEFT, MAX_PATH, TRACE, RequestInfo, is_watching
from pageturner.http.slices import in_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, SpanContext

log = logging.getLogger("pageturner")

QUEUE = 4096  # spans that wait for the collector; beyond them the oldest are dropped
EVERY = 1.0  # seconds between two messages to the collector
CLOSE_SECONDS = 2.0  # at the end, for what still waits
MAX_ORIGINS = 1024  # requests that asked for what goes on without them and are remembered
PATH = "/v1/traces"  # of OTLP over HTTP, where the endpoint has none
CARRIED = (b"traceparent", b"tracestate")
MISSING = '--otlp-traces-endpoint needs OpenTelemetry: pip install "pageturner[otel]"'
Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ChildSpan:
    """A span below that of a request. start, end: in seconds of time.monotonic."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """The part of a request's span that is about its answer. name: of the span."""

    name: str
    attributes: dict[str, Any]
    children: list[ChildSpan]


class SpanSource(Protocol):
    """The knowledge of a server about its answers. All three are asked only of requests that have
    `streams`."""

    def is_settled(self, info: RequestInfo) -> bool:
        """Return whether the times of the answer are known."""

    async def settle(self, info: RequestInfo) -> None:
        """Wait until they are known, for a second at most."""

    def describe(self, info: RequestInfo, path: str, now: float) -> AnswerSpan: ...


def check_endpoint(url: str) -> str:
    """The address of the collector, with its path. EngineFault('bad_setting') for one that is none,
    and where OpenTelemetry is missing."""
    import importlib.util

    message = f"--otlp-traces-endpoint is a URL as http://localhost:4318{PATH} (OTLP over HTTP)"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.netloc) and parts.port != 0
    except ValueError:
        raise bad_setting(f"{message}; what was given is none") from None
    if not good:
        raise bad_setting(f"{message}, not {_without_password(url)!r}")
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise bad_setting(MISSING)
    return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()


def start_traces(
    url: str,
    service: str,
    quiet: Collection[str],
    source: SpanSource | None = None,
    *,
    hand_on: bool = False,
) -> Traces:
    """Traces for the collector at that address.

    service  by which the collector knows this program, unless OTEL_SERVICE_NAME says another name
    quiet    paths whose requests are not traced
    """
    endpoint = check_endpoint(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not log.isEnabledFor(logging.DEBUG):  # which says each loss, with a traceback
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
    resource = _program({**named, "service.version": pageturner.__version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    told = _told(OTLPSpanExporter(endpoint=endpoint), _without_password(endpoint))
    batches = BatchSpanProcessor(told, max_queue_size=QUEUE, schedule_delay_millis=1000 * EVERY)
    return Traces(provider, batches, quiet, source, hand_on=hand_on)


def _program(about: dict[str, str]) -> Resource:
    """Return what the collector is told of this program. The SDK asks for its hash at each span
    that it encodes, and makes that anew from the JSON of all of it, a quarter of the work: here it
    is made once."""
    from opentelemetry.sdk.resources import Resource

    class HashedResource(Resource):
        def __init__(self, found: Resource) -> None:
            super().__init__(dict(found.attributes), found.schema_url)
            self._hash = hash(found)

        def __hash__(self) -> int:
            return self._hash

        def __eq__(self, other: object) -> bool:
            return self is other

    return HashedResource(Resource.create(dict(about)))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _told(exporter: SpanExporter, where: str) -> SpanExporter:
    """The exporter, with a word in the log when it loses its collector, and when it has it
    again."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class ToldExporter(SpanExporter):
        def __init__(self) -> None:
            self._lost = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:  # some versions let what the connection raises through
                log.debug("traces: %r", error)
                result = SpanExportResult.FAILURE
            lost = result is not SpanExportResult.SUCCESS
            if lost and not self._lost:
                log.warning(
                    "traces do not reach %s, and are dropped until they do; answers go on", where
                )
            if self._lost and not lost:
                log.info("traces reach %s again", where)
            self._lost = lost
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return ToldExporter()


class Traces:
    """The traces of all requests of a program. processor: takes the spans that have ended; hand_on:
    the request goes on to another server, with our span as its parent."""

    def __init__(
        self,
        provider: TracerProvider,
        processor: SpanProcessor,
        quiet: Collection[str],
        source: SpanSource | None = None,
        *,
        hand_on: bool = False,
    ) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        provider.add_span_processor(processor)
        self.source = source
        self._tracer = provider.get_tracer("pageturner", pageturner.__version__)
        self._scope = InstrumentationScope("pageturner", pageturner.__version__)
        self._provider = provider
        self._processor = processor
        self._propagator = TraceContextTextMapPropagator()
        self._quiet = quiet
        self._hand_on = hand_on
        self._late: set[asyncio.Task[None]] = set()
        self._origins: OrderedDict[str, TraceOrigin] = OrderedDict()

    def begin(self, scope: Any) -> RequestTrace | None:
        """Begin the trace of a request; None for paths that are not traced. If the request is
        forwarded, the headers in the scope carry our span."""
        from opentelemetry.trace import SpanKind, get_current_span, set_span_in_context

        path = scope["path"]
        if is_watching(path, self._quiet):
            return None
        given: dict[str, str] = {}
        for name in CARRIED:
            values = [value for header, value in scope["headers"] if header == name]
            if len(values) == 1:  # two of them name no parent
                given[name.decode()] = values[0].decode("latin-1")
        context, path = self._propagator.extract(given), plain(path[:MAX_PATH])
        about = {"http.request.method": scope["method"], "url.path": path}
        span = self._tracer.start_span(f"{scope['method']} {path}", context, SpanKind.SERVER, about)
        parented = get_current_span(context).get_span_context().is_valid
        scope[TRACE] = trace = RequestTrace(self, _offset(), path, span, parented)
        if self._hand_on:
            carried: dict[str, str] = {}
            self._propagator.inject(carried, set_span_in_context(trace.span))
            others = [header for header in scope["headers"] if header[0] not in CARRIED]
            own = [(name.encode(), value.encode("latin-1")) for name, value in carried.items()]
            scope["headers"] = [*others, *own]
        return trace

    def remember(self, name: str, scope: Any) -> None:
        """Note that what this request asks for will be done under that name, with spans of its own.
        Only so many names are remembered, the newest, and none by the next process."""
        if (trace := scope.get(TRACE)) is not None:
            self._origins[name] = trace.origin
            if len(self._origins) > MAX_ORIGINS:
                self._origins.popitem(last=False)

    def begin_named(self, name: str, path: str) -> RequestTrace:
        """A piece of what is done under that name begins."""
        return self.begin_apart(path, self._origins.get(name))

    def begin_apart(self, path: str, origin: TraceOrigin | None) -> RequestTrace:
        """Something begins that outlives the request which asked for it. origin: that request; None
        where it is not known any more."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, set_span_in_context

        context, links = Context(), list[Link]()
        if origin is not None and origin.parented:
            context = set_span_in_context(NonRecordingSpan(origin.context), context)
        elif origin is not None:
            links = [Link(origin.context)]
        about: dict[str, Any] = {
            "http.request.method": "POST",
            "url.path": path,
            "pageturner.apart": True,
        }
        span = self._tracer.start_span(f"POST {path}", context, SpanKind.INTERNAL, about, links)
        return RequestTrace(self, _offset(), path, span, context != Context())

    def add_child(
        self, parent: Span, name: str, about: dict[str, Any], start: int, end: int
    ) -> None:
        """A span that has begun and ended already, in nanoseconds. Only its parent was made by the
        SDK's tracer, which asks the sampler, locks, copies and counts each time: that is most of
        what a span costs, and says nothing new of a child."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext

        of = parent.get_span_context()
        id = self._provider.id_generator.generate_span_id()
        own = SpanContext(
            of.trace_id, id, is_remote=False, trace_flags=of.trace_flags, trace_state=of.trace_state
        )
        self._processor.on_end(
            ReadableSpan(
                name,
                own,
                of,
                self._provider.resource,
                about,
                start_time=start,
                end_time=end,
                instrumentation_scope=self._scope,
            )
        )

    def end(self, trace: RequestTrace, info: RequestInfo) -> None:
        """End the trace of a request. If the engine has not reported its timings yet, the span is
        written a little later."""
        now = time.monotonic()
        if self.source is None or not trace.recorded or self.source.is_settled(info):
            trace.finish(info, now)
            return
        late = asyncio.ensure_future(self._end_late(self.source, trace, info, now))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def _end_late(
        self, source: SpanSource, trace: RequestTrace, info: RequestInfo, now: float
    ) -> None:
        try:
            await source.settle(info)
        finally:
            trace.finish(info, now)

    async def close(self) -> None:
        """Have what is left sent, for CLOSE_SECONDS at most."""
        if self._late:
            await asyncio.wait(self._late, timeout=CLOSE_SECONDS)
        # on a thread that a collector which does not answer keeps, and nobody waits for
        await asyncio.wait({in_thread(self._provider.shutdown)}, timeout=CLOSE_SECONDS)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """A request that asked for something which outlives it. parented: it came with a
    `traceparent`."""

    context: SpanContext
    parented: bool


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of a request. offset: nanoseconds from time.monotonic to the time of day, when it
    came."""

    traces: Traces
    _offset: int
    path: str
    span: Span
    _parented: bool

    @property
    def recorded(self) -> bool:
        """Return whether the span is sampled: children of an unsampled parent are not recorded."""
        return self.span.is_recording()

    @property
    def origin(self) -> TraceOrigin:
        """Return what is to be kept of it by what it asks for and does not wait for."""
        return TraceOrigin(self.span.get_span_context(), self._parented)

    def finish(self, info: RequestInfo, now: float) -> None:
        """End the span with all that is known of the request."""
        from opentelemetry.trace import Status, StatusCode

        if not self.recorded:
            info.streams = []
            return
        span, status = self.span, info.status or CLIENT_LEFT
        told: dict[str, Any] = {
            "http.response.status_code": status,
            "gen_ai.request.id": plain(info.id),
        }
        if info.tenant:
            told["pageturner.tenant"] = plain(info.tenant)
        if "replica" in info.about:
            told |= {f"pageturner.{name}": info.about[name] for name in ("replica", "tries")}
        if status >= 500 or info.abort_reason:
            told["error.type"] = info.abort_reason or str(status)
            span.set_status(Status(StatusCode.ERROR))
        if info.streams and self.traces.source is not None:
            answer = self.traces.source.describe(info, self.path, now)
            span.update_name(answer.name)
            told |= answer.attributes
            for child in answer.children:
                start, end = self._at(child.start), self._at(child.end)
                self.traces.add_child(span, child.name, child.attributes, start, end)
        info.streams = []  # the connection keeps this until its next request
        span.set_attributes(told)
        span.end(self._at(now))

    def _at(self, moment: float) -> int:
        return round(1e9 * moment) + self._offset


def _offset() -> int:
    return time.time_ns() - time.monotonic_ns()


def plain(text: str) -> str:
    """Return the text as UTF-8 can write it: a span that cannot be written takes others with it."""
    return text.encode(errors="backslashreplace").decode()
