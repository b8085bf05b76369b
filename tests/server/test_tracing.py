"""Traces: what spans a request has, whose children they are, and what becomes of them without a collector."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pageturner.http import tracing
from pageturner.http.request_info import RequestInfo
from pageturner.http.tracing import (
    CARRIED,
    MISSING,
    Traces,
    check_endpoint,
    start_traces,
)
from pageturner.request import Timings
from pageturner.router.forwarding import HOP
from pageturner.server.observability.answer_spans import AnswerSpans, note_answer
from pageturner.text.output_stream import OutputStream, StreamTimes
from support.refusals import engine_fault

from .conftest import Server
from .test_batches import TEXT, as_file, ended, line, upload
from .test_http import post
from .test_streams import make

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
UNFINISHED = ("queued", "in_progress")
Start = Callable[..., Server]


async def settled(_: list[OutputStream]) -> None:
    pass


@dataclass
class Kept:
    """Traces whose spans stay here. now: when the request came."""

    hand_on: bool = False
    settle: Any = settled
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        names = {7: "their-request"}
        source = AnswerSpans(lambda id: names.get(id, ""), self.settle)
        processor = SimpleSpanProcessor(self.exporter)
        self.traces = Traces(provider, processor, {"/health"}, source, hand_on=self.hand_on)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def scope(*headers: tuple[bytes, bytes], path: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "headers": list(headers)}


def traceparent(flags: str = "01") -> tuple[bytes, bytes]:
    return b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode()


def answered(begin: float, *spans: tuple[float, float, str, int], **params: Any) -> RequestInfo:
    """A request that came then and has ended, with what it did in seconds since."""
    stream, _ = make(**params)
    moved = tuple((begin + start, begin + end, what, by) for start, end, what, by in spans)
    parts = {"queue_blocks": 0.2, "own_decode": 0.3}
    timings = Timings(begin + 0.1, begin + spans[-1][1], parts, moved) if spans else None
    stream.times = StreamTimes(begin, begin + 0.05, 1, begin + 0.5, begin + 0.8, timings)
    stream.tokens, stream.finish, stream.cached = [5, 6], "length", 1
    info = RequestInfo("r.1", status=200, model="tiny")
    note_answer(info, [stream])
    return info


SPANS = (
    (0.1, 0.3, "queue_blocks", 7),
    (0.3, 0.5, "prefill", 0),
    (0.5, 0.6, "decode", 0),
    (0.6, 0.7, "decode", 7),
    (0.7, 0.75, "stalled", 7),
    (0.75, 0.8, "preempted", 9),
)


def test_a_span_for_the_request_and_below_it_one_for_each_thing_that_it_did() -> None:
    kept, begin = Kept(), time.monotonic() - 1.0
    trace = kept.traces.begin(scope(traceparent(), (b"tracestate", b"a=b")))
    assert trace is not None
    kept.traces.end(trace, answered(begin, *SPANS, temperature=0.5, max_tokens=9))
    root = kept.spans["chat tiny"]
    assert root.context is not None
    assert root.parent is not None
    assert (root.context.trace_id, root.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    expected = {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pageturner",
        "gen_ai.request.id": "r.1",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.latency.time_to_first_token": pytest.approx(0.5),
        "gen_ai.latency.time_in_queue": pytest.approx(0.25),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.2),
        "gen_ai.latency.time_in_model_decode": pytest.approx(0.3),
        "gen_ai.latency.time_in_model_inference": pytest.approx(0.5),
        "pageturner.seconds.queue_blocks": 0.2,
    }
    found = dict(root.attributes or {})
    assert {name: found.get(name) for name in expected} == expected
    children = [span for span in kept.exporter.get_finished_spans() if span is not root]
    names = [
        "accept",
        "step_under_way",
        "queue",
        "prefill",
        "decode",
        "stalled",
        "preempted",
        "delivery",
    ]
    assert [span.name for span in children] == names
    for before, after in pairwise(children):
        assert before.end_time == after.start_time
    for span in children:
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    seconds = {
        span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in children
    }
    assert seconds["queue"] == pytest.approx(0.2)
    assert seconds["decode"] == pytest.approx(0.2)
    queue, decode = (
        dict(kept.spans["queue"].attributes or {}),
        dict(kept.spans["decode"].attributes or {}),
    )
    assert queue == {"pageturner.cause": "blocks", "pageturner.behind": ("their-request",)}
    assert decode == {"pageturner.behind": ("their-request",)}
    assert dict(kept.spans["preempted"].attributes or {}) == {}, (
        "nobody knows that request any more"
    )


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"traceparent", b"00-\xff\xff-\x00-01"),),
        ((b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"),),
        (traceparent(), traceparent()),
        ((b"tracestate", b"=" * 10_000),),
    ],
)
def test_no_parent_or_none_that_can_be_read_begins_a_trace(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    kept = Kept()
    trace = kept.traces.begin(scope(*headers, path="/v1/models\udcff"))
    assert trace is not None
    kept.traces.end(trace, RequestInfo("r.1", status=200))
    (span,) = kept.exporter.get_finished_spans()
    assert span.parent is None
    assert span.name == "POST /v1/models\\udcff"


def test_who_only_watches_and_what_is_not_sampled_has_no_span() -> None:
    kept = Kept()
    assert kept.traces.begin(scope(path="/health")) is None
    assert kept.traces.begin(scope(path="/v1/live")) is None
    trace = kept.traces.begin(scope(traceparent("00")))
    assert trace is not None
    kept.traces.end(trace, answered(time.monotonic() - 1.0, *SPANS))
    assert kept.exporter.get_finished_spans() == ()


def test_only_so_many_are_remembered_and_who_is_forgotten_begins_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "MAX_ORIGINS", 2)
    kept = Kept()
    for number in range(3):
        came = scope(traceparent())
        assert kept.traces.begin(came) is not None
        kept.traces.remember(f"batch_{number}", came)
    for number in range(3):
        kept.traces.end(
            kept.traces.begin_named(f"batch_{number}", "/v1/completions"),
            RequestInfo("r.1", status=200),
        )
    first, *others = kept.exporter.get_finished_spans()
    assert (first.parent, first.links) == (None, ())
    assert [span.context.trace_id for span in others if span.context] == [int(TRACE, 16)] * 2


def test_the_share_of_requests_that_are_traced_is_the_standard_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    kept = Kept()
    for headers in ((), (traceparent(),)):
        trace = kept.traces.begin(scope(*headers))
        assert trace is not None
        kept.traces.end(trace, answered(time.monotonic() - 1.0, *SPANS))
    assert {span.context.trace_id for span in kept.spans.values() if span.context} == {
        int(TRACE, 16)
    }


@pytest.mark.parametrize(
    ("status", "aborted", "error"), [(503, "", "503"), (0, "client left", "client left")]
)
def test_failures_are_marked(status: int, aborted: str, error: str) -> None:
    kept = Kept()
    trace = kept.traces.begin(scope())
    assert trace is not None
    kept.traces.end(trace, RequestInfo("r.1", status=status, abort_reason=aborted))
    (span,) = kept.exporter.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["error.type"] == error


def test_times_that_are_none_make_no_spans() -> None:
    kept, begin, inf = Kept(), time.monotonic() - 1.0, float("inf")
    trace = kept.traces.begin(scope())
    assert trace is not None
    strange = (
        (0.1, float("nan"), "prefill", 0),
        (-inf, 0.4, "decode", 0),
        (0.4, inf, "stalled", 0),
        (0.5, 1e9, "later", 0),
        (0.5, 0.6, "sound", 0),
    )
    kept.traces.end(trace, answered(begin, *strange))
    assert "sound" in kept.spans
    assert not {"prefill", "decode", "stalled", "later"} & set(kept.spans)


async def test_an_account_that_comes_late_is_waited_for() -> None:

    begin = time.monotonic() - 1.0
    late, info = answered(begin, *SPANS).streams[0].times, answered(begin)

    async def settle(streams: list[OutputStream]) -> None:
        await asyncio.sleep(0)
        streams[0].times.timings = late.timings

    kept = Kept(settle=settle)
    trace = kept.traces.begin(scope())
    assert trace is not None
    kept.traces.end(trace, info)
    assert not kept.spans
    await kept.traces.close()
    assert "prefill" in kept.spans
    assert "chat tiny" in kept.spans


def test_a_router_hands_its_own_span_on_as_the_parent() -> None:
    kept, came = Kept(hand_on=True), scope((b"a", b"b"), traceparent(), (b"tracestate", b"x=y"))
    trace = kept.traces.begin(came)
    assert trace is not None
    handed = dict(came["headers"])
    assert len(handed) == len(came["headers"]) == 3
    version, id, span, flags = handed[b"traceparent"].decode().split("-")
    assert (version, id, flags) == ("00", TRACE, "01")
    assert (handed[b"tracestate"], handed[b"a"]) == (b"x=y", b"b")
    info = RequestInfo("r.1", status=200, about={"replica": "http://one", "tries": 2})
    kept.traces.end(trace, info)
    (own,) = kept.exporter.get_finished_spans()
    assert own.context is not None
    assert own.context.span_id == int(span, 16)
    assert (own.attributes or {})["pageturner.replica"] == "http://one"


# -- processes -----------------------------------------------------------------------------------------------
class Collector(ThreadingHTTPServer):
    """Takes what an exporter sends. spans: with the name of the program each is of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += [(names["service.name"], span) for span in scope.spans]
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


def test_a_collector_is_told_in_otlp(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "by-another-name")

    async def run() -> None:
        traces = start_traces(
            collector.url, "pageturner", (), AnswerSpans(lambda _: "", settled), hand_on=True
        )
        trace = traces.begin(scope(traceparent()))
        assert trace is not None
        traces.end(trace, answered(time.monotonic() - 1.0, *SPANS))
        await traces.close()

    asyncio.run(run())
    assert {of for of, _ in collector.spans} == {"by-another-name"}
    spans = {span.name: span for _, span in collector.spans}
    assert spans["chat tiny"].trace_id.hex() == TRACE
    assert spans["chat tiny"].parent_span_id.hex() == PARENT
    assert spans["decode"].parent_span_id == spans["chat tiny"].span_id
    told = {one.key: one.value for one in spans["chat tiny"].attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 2


@pytest.mark.slow
def test_one_trace_from_a_client_over_the_router_to_the_engine(
    start: Start, collector: Collector
) -> None:
    server = start("--otlp-traces-endpoint", collector.url, FAKE_ENGINE="own")
    router = start(
        server.url, "--otlp-traces-endpoint", f"{collector.url}/v1/traces", command="route"
    )
    headers = dict([tuple(one.decode() for one in traceparent())])
    body = {"prompt": "a prompt that is nobody's business", "max_tokens": 4, "ignore_eos": True}
    answer = router.http.post(
        "/v1/completions", json=body, headers={**headers, "x-request-id": "r.9"}
    )
    assert answer.status_code == 200
    assert post(server, prompt="hello", max_tokens=20, stop=["l"]).status_code == 200
    router.http.get("/health")
    assert router.stop() == 0
    assert server.stop() == 0
    ours = [(of, span) for of, span in collector.spans if span.trace_id.hex() == TRACE]
    (relayed,) = (span for of, span in ours if of == "pageturner-router")
    served = {span.name: span for of, span in ours if of == "pageturner"}
    root = served["text_completion fake"]
    assert relayed.name == "POST /v1/completions"
    assert relayed.parent_span_id.hex() == PARENT
    assert root.parent_span_id == relayed.span_id
    assert {"accept", "prefill", "decode"} <= set(served)
    assert {span.parent_span_id for name, span in served.items() if span is not root} == {
        root.span_id
    }
    told = {one.key: one.value for one in root.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 4
    assert told["gen_ai.request.id"].string_value == "r.9"
    others = [span for _, span in collector.spans if span.trace_id.hex() != TRACE]
    assert "decode" in {span.name for span in others}, (
        "the account of a request that a stop string ended"
    )
    assert b"nobody's business" not in b"".join(
        span.SerializeToString() for _, span in collector.spans
    )


def until_ended(server: Server, id: str) -> str:
    server.until(lambda: server.http.get(f"/v1/responses/{id}").json()["status"] not in UNFINISHED)
    return str(server.http.get(f"/v1/responses/{id}").json()["status"])


@pytest.mark.slow
def test_what_outlives_its_request_has_spans_and_leads_back_to_it(
    start: Start, collector: Collector, tmp_path: Path
) -> None:
    flags = ("--otlp-traces-endpoint", collector.url, "--batch-dir", str(tmp_path / "b"))
    server = start(*flags)
    parent = dict([tuple(one.decode() for one in traceparent())])
    for number, (headers, fields) in enumerate(
        [({}, {}), (parent, {}), ({}, {"input": "<|fail|>"})]
    ):
        body = {"input": "hi", "max_output_tokens": 9, "background": True, **fields}
        told = server.http.post(
            "/v1/responses", json=body, headers={**headers, "x-request-id": f"b{number}"}
        )
        assert until_ended(server, told.json()["id"]) == ("failed" if fields else "incomplete")
    refused = server.http.post(
        "/v1/responses", json={"input": "hi", "background": True, "top_p": 7}
    )
    assert refused.status_code == 400
    for number, headers in enumerate(({}, parent)):
        file = upload(server.http, as_file([line(f"{number} {i}", prompt="a") for i in range(2)]))
        wanted = {"input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h"}
        told = server.http.post("/v1/batches", json=wanted, headers=headers)
        assert ended(server, told.json()["id"])["request_counts"]["completed"] == 2
    assert server.stop() == 0
    spans = [span for _, span in collector.spans]
    told = {id(span): {one.key: one.value for one in span.attributes} for span in spans}
    apart = [span for span in spans if "pageturner.apart" in told[id(span)]]
    askers = {
        span.span_id: span
        for span in spans
        if span.name in ("POST /v1/responses", "POST /v1/batches")
    }
    names = sorted(span.name for span in apart)
    assert names == ["chat fake"] * 3 + ["text_completion fake"] * 4, (
        "the refused one has none of its own"
    )
    for span in apart:
        asker = askers[span.parent_span_id or span.links[0].span_id]
        if asker.trace_id.hex() == TRACE:
            assert (span.trace_id, span.parent_span_id) == (asker.trace_id, asker.span_id)
        else:
            assert span.trace_id != asker.trace_id
            assert not span.parent_span_id
            assert [link.trace_id for link in span.links] == [asker.trace_id]
        failed = told[id(span)]["http.response.status_code"].int_value == 500
        assert failed == (told[id(span)]["gen_ai.request.id"].string_value == "b2")
        assert failed or told[id(span)]["gen_ai.usage.output_tokens"].int_value > 0
    assert sum(span.trace_id.hex() == TRACE for span in apart) == 3


@pytest.mark.slow
def test_without_its_collector_a_server_answers_and_says_so_once(start: Start) -> None:
    server = start(
        "--otlp-traces-endpoint",
        "http://user:secret@127.0.0.1:9/v1/traces",
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    for _ in range(3):
        assert post(server, max_tokens=2).status_code == 200
    server.until(lambda: "do not reach http://127.0.0.1:9/v1/traces" in server.log)
    assert post(server, max_tokens=2).status_code == 200
    assert server.stop() == 0
    assert server.finished().count("do not reach") == 1
    assert "secret" not in server.log
    assert "Traceback" not in server.log


def test_endpoints_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_endpoint("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert check_endpoint("https://there/otlp") == "https://there/otlp"
    for wrong in (
        "localhost:4317",
        "grpc://user:secret@there",
        "http://[::1",
        "http://there:99999",
    ):
        with engine_fault("OTLP over HTTP") as raised:
            check_endpoint(wrong)
        assert "secret" not in raised.value.message
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with engine_fault() as missing:
        check_endpoint("http://localhost:4318")
    assert missing.value.message == MISSING
    assert 'pip install "pageturner[otel]"' in MISSING


def test_nothing_of_it_is_imported_where_nobody_wants_traces() -> None:
    modules = "pageturner.server.server, pageturner.server.app, pageturner.http.tracing, pageturner.router.route"
    program = (
        f"import sys, {modules}; print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_router_that_traces_nothing_hands_on_what_came() -> None:
    assert not HOP & set(CARRIED)
