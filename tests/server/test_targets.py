"""Priorities, deadlines, targets and tenants over HTTP: what is taken, what is refused, what counts."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pageturner.http.api_keys import ANYBODY, ApiKey
from pageturner.params import SamplingParams
from pageturner.request import EXPIRED, Event, Failure, Request
from pageturner.server.admission.goodput import WINDOW, Goodput
from pageturner.server.admission.service_level import ServiceLevel, service_level_of
from pageturner.server.api.base.body import RequestBody, decode
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.observability.metrics import Metrics
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.output_stream import OutputStream, StreamTimes
from support.refusals import client_error, refusal_of

from .bytes_tokenizer import BytesTokenizer
from .conftest import Server
from .test_streams import Kept


def said(
    body: dict[str, Any], headers: dict[str, str] | None = None, key: ApiKey = ANYBODY
) -> ServiceLevel:
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return service_level_of(decode(json.dumps(body).encode()), raw, key)


def test_fields_go_before_headers() -> None:
    fields = {
        "priority": -3,
        "deadline_ms": 1500,
        "ttft_target_ms": 250.5,
        "tpot_target_ms": 20,
        "user": "u",
    }
    assert said(fields) == ServiceLevel(-3, 1.5, 0.2505, 0.02, "u")
    headers = {
        "X-Priority": "+7",
        "X-Deadline-Ms": "2000",
        "X-TTFT-Target-Ms": "1e3",
        "X-TPOT-Target-Ms": " 30 ",
        "X-Tenant": "acme.2",
    }
    assert said({}, headers) == ServiceLevel(7, 2.0, 1.0, 0.03, "acme.2")
    assert said(fields, headers) == ServiceLevel(-3, 1.5, 0.2505, 0.02, "acme.2")
    assert said({}) == said({"priority": None, "deadline_ms": None}) == ServiceLevel()


def test_keys_tell_the_tenant_before_headers_do() -> None:
    assert said({"user": "u"}, {"X-Tenant": "other"}, ApiKey("key-1")).tenant == "key-1"
    assert said({"user": "u"}).tenant == "u"


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"priority": 2**40}, {}, "priority"),
        ({"deadline_ms": 0}, {}, "deadline_ms"),
        ({"deadline_ms": -5}, {}, "deadline_ms"),
        ({"ttft_target_ms": 1e12}, {}, "ttft_target_ms"),
        ({"tpot_target_ms": -0.1}, {}, "tpot_target_ms"),
        ({}, {"X-Priority": "high"}, "X-Priority"),
        ({}, {"X-Priority": "9999999999"}, "X-Priority"),
        ({}, {"X-Deadline-Ms": "nan"}, "X-Deadline-Ms"),
        ({}, {"X-Deadline-Ms": "inf"}, "X-Deadline-Ms"),
        ({}, {"X-TTFT-Target-Ms": ""}, "X-Ttft-Target-Ms"),
        ({}, {"X-TPOT-Target-Ms": "-1"}, "X-Tpot-Target-Ms"),
        ({}, {"X-Tenant": "a b"}, "X-Tenant"),
        ({}, {"X-Tenant": "x" * 65}, "X-Tenant"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    with client_error(status=400, code="invalid_value", param=param) as caught:
        said(body, headers)
    assert param in caught.value.message


@pytest.mark.parametrize(
    "body", ['{"deadline_ms": NaN}', '{"ttft_target_ms": "5"}', '{"priority": 1.5}']
)
def test_what_is_no_number(body: str) -> None:
    with client_error(status=400):
        decode(body.encode())


def test_the_engine_is_told(server: Server) -> None:
    fields = {
        "prompt": "targets",
        "max_tokens": 1,
        "priority": 4,
        "deadline_ms": 60_000,
        "ttft_target_ms": 9000,
    }
    headers = {"x-tpot-target-ms": "125", "x-tenant": "acme"}
    assert server.http.post("/v1/completions", json=fields, headers=headers).status_code == 200
    note = server.notes("submit")[-1]
    told = [note[name] for name in ("priority", "ttft", "tpot", "tenant", "salt")]
    assert told == [4, 9.0, 0.125, "acme", ""]
    assert note["left"] == pytest.approx(60.0)
    answer = server.http.post("/v1/completions", json={"prompt": "a", "deadline_ms": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deadline_ms")


# -- with the engine of the product --------------------------------------------------------------------------
STEP = 0.02


@pytest.fixture
def busy(start: Callable[..., Server]) -> Iterator[tuple[Server, threading.Thread]]:
    """A server with one place, which is taken for more than a second."""
    step = {"PAGETURNER_FAKE_STEP_SECONDS": str(STEP), "PAGETURNER_FAKE_VOCAB": "255"}
    server = start("--max-num-seqs", "1", FAKE_ENGINE="own", **step)
    for _ in range(3):  # it learns how long answers are, and what a step takes
        ask(server, prompt="long", max_tokens=10)
    first = threading.Thread(
        target=ask, args=(server,), kwargs={"prompt": "long", "max_tokens": 70}
    )
    first.start()
    server.until(lambda: server.metric("vllm:num_requests_running") == 1)
    yield server, first
    first.join(30)


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(
        "/v1/completions", json={"prompt": "hello", "ignore_eos": True, **fields}, timeout=30
    )


@pytest.mark.slow
def test_refused_for_its_target_and_taken_when_it_was_told(
    busy: tuple[Server, threading.Thread],
) -> None:
    server, _ = busy
    hurry = {"max_tokens": 2, "ttft_target_ms": 60, "stream": True}
    refused = ask(server, **hurry)
    assert refusal_of(refused) == (
        429,
        "ttft_target_unreachable",
    )
    wait = int(refused.headers["retry-after"])
    assert 1 <= wait <= 4
    assert server.metric("pageturner:target_outcomes_total") == 2, (
        "one refused, and all of its targets"
    )
    patient = ask(server, max_tokens=2, ttft_target_ms=30_000)
    assert patient.status_code == 200
    for _ in range(5):  # a busy machine may be slower than it was
        time.sleep(wait)
        answer = ask(server, **hurry)
        if answer.status_code == 200:
            break
        wait = int(answer.headers["retry-after"])
    assert answer.status_code == 200
    counted = dict(
        re.findall(r'target_outcomes_total{.*outcome="(\w+)",target="all"} (\S+)', _sorted(server))
    )
    assert (counted["met"], float(counted["refused"]) >= 1) == ("2.0", True)
    assert 0 < server.metric("pageturner:goodput_ratio") < 1
    assert server.metric("pageturner:goodput_requests_per_second") == pytest.approx(2 / WINDOW)
    assert server.metric("pageturner:ttft_forecasts") >= 1


def _sorted(server: Server) -> str:
    """The metrics, labels in alphabetical order."""
    text = server.http.get("/metrics").text
    return re.sub(r"{(.*)}", lambda found: "{" + ",".join(sorted(found[1].split(","))) + "}", text)


def test_a_deadline_ends_who_waits_and_who_runs(busy: tuple[Server, threading.Thread]) -> None:
    server, first = busy
    waiting = ask(server, max_tokens=2, deadline_ms=400)
    assert refusal_of(waiting) == (429, "deadline_unreachable")
    first.join()
    running = ask(server, max_tokens=2000, deadline_ms=250)
    assert (running.status_code, running.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    assert running.json()["error"]["reason"] == "deadline_exceeded"
    assert "retry-after" not in running.headers
    stream = ask(server, max_tokens=2000, deadline_ms=800, stream=True)
    assert stream.status_code == 200
    *pieces, error, done, rest = stream.text.split("\n\n")
    assert (len(pieces) > 0, done, rest) == (True, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["reason"] == "deadline_exceeded"
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_a_deadline_holds_while_there_is_no_engine(start: Callable[..., Server]) -> None:
    """It is the supervisor that ends it, a little later."""
    server = start("--engine-timeout", "60", FAKE_STEP_SECONDS="0.001")
    answer = ask(server, prompt="<|stall|>", max_tokens=5, deadline_ms=200)
    assert refusal_of(answer) == (504, "deadline_exceeded")
    server.until(lambda: server.notes("abort"))


# -- goodput -------------------------------------------------------------------------------------------------
def stream(id: int = 1, **targets: float) -> OutputStream:
    request = Request(id, (1, 2, 3), SamplingParams(max_tokens=3), arrival=0.0, **targets)  # type: ignore[arg-type]
    return OutputStream(
        request, 0, Detokenizer(BytesTokenizer(), ()), Kept(), StreamTimes(0.0), eos_ids=(257,)
    )


def outcomes(goodput: Goodput) -> dict[str, str]:
    return {target: outcome for (target, outcome), count in goodput.outcomes.items() if count}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ({}, {}),
        ({"ttft_target": 1.0}, {"ttft": "met", "all": "met"}),
        ({"ttft_target": 0.9}, {"ttft": "missed", "all": "missed"}),
        ({"tpot_target": 2.0, "deadline": 5.0}, {"tpot": "met", "deadline": "met", "all": "met"}),
        (
            {"tpot_target": 1.9, "deadline": 5.0},
            {"tpot": "missed", "deadline": "met", "all": "missed"},
        ),
        (
            {"deadline": 4.9, "ttft_target": 1.0},
            {"deadline": "missed", "ttft": "met", "all": "missed"},
        ),
    ],
)
def test_who_met_its_targets(targets: dict[str, float], expected: dict[str, str]) -> None:
    """Tokens at 1, 3 and 5 seconds."""
    metrics, now = Metrics(), [0.0]
    streams, one = OpenStreams(metrics, 4, clock=lambda: now[0]), stream(**targets)
    streams.add([one])
    for i in range(3):
        now[0] = 1.0 + 2 * i
        streams.deliver([Event(1, 0, 3 + i, (97,), finish="length" if i == 2 else None)])
    assert outcomes(metrics.goodput) == expected
    met = expected.get("all", "met") == "met"
    assert metrics.goodput.last_minute(5.0) == (float(met), met * bool(expected) / WINDOW)


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (EXPIRED, "missed"),
        (Failure("x", ""), "missed"),
        (Failure("ttft_target_unreachable", ""), "refused"),
    ],
)
def test_who_failed_met_nothing(failure: Failure, outcome: str) -> None:
    metrics, one = Metrics(), stream(ttft_target=9.0, tpot_target=9.0)
    streams = OpenStreams(metrics, 4, clock=lambda: 1.0)
    streams.add([one])
    streams.fail(one, failure)
    assert outcomes(metrics.goodput) == dict.fromkeys(("ttft", "tpot", "all"), outcome)


def test_who_left_counts_only_if_it_was_late() -> None:
    metrics, now = Metrics(), [0.0]
    streams = OpenStreams(metrics, 9, clock=lambda: now[0])
    early, late = stream(1, ttft_target=2.0), stream(2, ttft_target=0.5, tpot_target=9.0)
    served, past = stream(3, ttft_target=0.5), stream(4, ttft_target=0.5, deadline=0.6)
    streams.add([early, late, served, past])
    streams.deliver([Event(3, 0, 3, (97,)), Event(4, 0, 3, (97,))])
    now[0] = 1.0
    for one in (early, late, served, past):
        streams.cancel(one)
    assert dict(metrics.goodput.outcomes) == {
        ("all", "met"): 0,
        ("all", "missed"): 2,
        ("all", "refused"): 0,
        ("ttft", "missed"): 1,
        ("deadline", "missed"): 1,
    }


def test_a_full_queue_refuses_targets_too_and_a_minute_is_forgotten() -> None:
    metrics, now = Metrics(), [5.0]
    streams = OpenStreams(metrics, 1, clock=lambda: now[0])
    streams.add([stream(1)])
    with client_error("full"):
        streams.check_room([stream(2, ttft_target=1.0)])
    assert outcomes(metrics.goodput) == {"ttft": "refused", "all": "refused"}
    assert metrics.goodput.last_minute(5.0)[0] == 0.0
    assert metrics.goodput.last_minute(5.0 + WINDOW + 1)[0] == 1.0


def test_body_has_no_other_targets() -> None:
    named = {name for name in RequestBody.__struct_fields__ if name.endswith("_ms")}
    assert named == {"deadline_ms", "ttft_target_ms", "tpot_target_ms"}
