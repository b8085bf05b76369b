"""What `bench serve` sends and when: arrivals, traces and their scaling, prompts, goodput, chats."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pageturner.lab.bench import bench_serve
from pageturner.lab.bench.client import Client, ResponseTimes
from pageturner.lab.traffic import traffic_flags
from pageturner.lab.traffic.prompt_text import PromptWriter
from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_files import TraceRow, TraceScaling, read_trace, trace_requests
from pageturner.lab.traffic.traffic_generators import poisson
from pageturner.progress import Progress
from support.refusals import engine_fault

ROWS = [
    {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 30, "client_id": 4},
    {"arrival_s": 2.5, "prompt_tokens": 7, "output_tokens": 1},
    {"arrival_s": 4.0, "prompt_tokens": 900, "output_tokens": 2000},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return path


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_args(["--base-url", "http://127.0.0.1:9", *words])


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    requests = poisson([TrafficRequest("x", None, 1)] * 4000, 8.0, seed=1)
    times = [one.arrival for one in requests]
    assert times == sorted(times)
    assert times == [
        one.arrival for one in poisson([TrafficRequest("x", None, 1)] * 4000, 8.0, seed=1)
    ]
    assert times != [
        one.arrival for one in poisson([TrafficRequest("x", None, 1)] * 4000, 8.0, seed=2)
    ]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1), "exponential gaps"


def test_a_trace_is_scaled_capped_and_said(trace: Path) -> None:
    made = traffic_flags.from_flags(
        arguments(
            "--trace", str(trace), "--length-scale", "0.5", "--rate-scale", "2", "--cap", "20"
        )
    )
    assert made.open
    assert [(one.max_tokens, one.output) for one in made.requests] == [
        (20, 15),
        (20, 1),
        (20, 1000),
    ]
    assert [one.arrival for one in made.requests] == [0.0, 1.25, 2.0]
    assert [len(one.text.split()) for one in made.requests] == [50, 4, 450]
    for part in ("lengths x 0.5", "rate x 2", "cap 20 (no oracle)", "the first 3", "1 answers cut"):
        assert part in made.about
    few = traffic_flags.from_flags(
        arguments("--trace", str(trace), "--num-prompts", "2", "--request-rate", "3")
    )
    assert len(few.requests) == 2
    assert few.requests[0].arrival > 0
    assert "Poisson arrivals at 3/s" in few.about


def test_the_oracle_is_called_one(trace: Path) -> None:
    made = traffic_flags.from_flags(arguments("--trace", str(trace), "--oracle", "--cap", "50"))
    assert [(one.max_tokens, one.output) for one in made.requests] == [
        (30, None),
        (1, None),
        (50, None),
    ]
    assert "ORACLE" in made.about


def test_requests_that_cannot_fit_are_left_out_and_counted(trace: Path) -> None:
    made = traffic_flags.from_flags(
        arguments("--trace", str(trace), "--cap", "100", "--max-model-len", "300")
    )
    assert len(made.requests) == 2
    assert "1 left out as longer than 300" in made.about
    with engine_fault("no request of the trace fits"):
        traffic_flags.from_flags(
            arguments("--trace", str(trace), "--cap", "100", "--max-model-len", "101")
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--length-scale", "0"], "length-scale"),
        (["--length-scale", "0.5"], "--trace"),
        (["--request-rate", "-1"], "request-rate"),
        (["--request-rate", "1", "--arrivals"], "leave --arrivals"),
        (["--workload", "a", "--trace", "b"], "not both"),
        (["--trace", "/nowhere"], "cannot read"),
        (["--cap", "0"], "--cap"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    with engine_fault(message):
        traffic_flags.from_flags(arguments(*words))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt_tokens": 0, "output_tokens": 1}', ":1: lengths"),
        ('{"prompt_tokens": 1, "output_tokens": 1}\n{"prompt_tokens": 1}', ":2: .*output_tokens"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "session_id": "s0"}', "sessions"),
        ("", "holds no request"),
    ],
)
def test_bad_traces_are_refused_by_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with engine_fault(message):
        read_trace(path, sessions=False)
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(content.encode() * 50)[:-12])
    with engine_fault():
        read_trace(broken, sessions=False)


def test_a_trace_without_times_needs_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": null, "prompt_tokens": 3, "output_tokens": 2}\n')
    with engine_fault("no arrival times"):
        traffic_flags.from_flags(arguments("--trace", str(path)))
    assert (
        traffic_flags.from_flags(arguments("--trace", str(path), "--request-rate", "1"))
        .requests[0]
        .output
        == 2
    )


class Letters:
    """One token a letter."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_prompts_have_the_asked_length_and_begin_anywhere() -> None:
    text = "It was the best of times, it was the worst of times. " * 20
    prompts = PromptWriter(text, Letters())
    assert [len(prompts.make(i, n)) for i, n in enumerate((1, 50, 3000))] == [1, 50, 3000]
    assert prompts.make(3, 40) == PromptWriter(text, Letters()).make(3, 40)
    assert len({prompts.make(i, 40) for i in range(20)}) > 5
    assert len(PromptWriter(text).make(0, 100).split()) == 75


def test_equal_blocks_of_a_trace_are_equal_text() -> None:
    rows = [TraceRow(1400, 1, 0.0, [0, 1, 2]), TraceRow(1030, 1, 0.0, [0, 1, 9])]
    first, second = PromptWriter().written(trace_requests(rows, TraceScaling(length=0.1)))
    a, b = first.text.split(), second.text.split()
    assert a[:102] == b[:102]
    assert a[102] != b[102] or a[103:] != b[103:]
    assert (len(a), len(b)) == (140, 103)


def test_the_open_loop_keeps_to_the_times() -> None:
    class Noting:
        order: list[str]

        def __init__(self) -> None:
            self.order = []

        async def complete(
            self, prompt: str, max_tokens: int, forced_end: int | None
        ) -> ResponseTimes:
            self.order.append(f"{prompt}{max_tokens}{forced_end}")
            return ResponseTimes(begin=0.0, end=1.0, chunks=[0.5], tokens=1)

    client = Noting()
    requests = [
        TrafficRequest("b", 7, 1, 0.05),
        TrafficRequest("a", None, 2),
        TrafficRequest("c", None, 3, 0.1),
    ]
    line = Progress("x", 3, enabled=False)
    assert len(asyncio.run(bench_serve.open_loop(client, requests, line))) == 3  # type: ignore[arg-type]
    assert client.order == ["a2None", "b17", "c3None"]


def test_goodput_counts_who_met_every_target() -> None:
    assert bench_serve.parse_targets(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    assert bench_serve.parse_targets(["e2el:9", "e2e:8"]) == {"e2e": 8.0}
    for word in ("ttft", "ttft:x", "itl:5", "ttft:0", "ttft:nan", "tpot:inf", "e2elx:5"):
        with engine_fault("goodput"):
            bench_serve.parse_targets([word])
    fast = ResponseTimes(begin=0.0, end=1.0, chunks=[0.1, 0.2, 0.3], tokens=3)
    late = ResponseTimes(begin=0.0, end=1.0, chunks=[0.6, 0.7, 0.8], tokens=3)
    slow = ResponseTimes(begin=0.0, end=1.0, chunks=[0.1, 0.9], tokens=2)
    failed = ResponseTimes(begin=0.0, end=0.1, error="HTTP 500")
    good = bench_serve.goodput([fast, late, slow, failed], 2.0, {"ttft": 500.0, "tpot": 200.0})
    assert (good["requests"], good["share"], good["requests_per_s"]) == (1, 0.25, 0.5)
    assert bench_serve.goodput([fast, late], 1.0, {"e2e": 1000.0})["requests"] == 2


def test_a_refusal_for_its_targets_is_no_failure() -> None:
    kept = ResponseTimes(begin=0.0, end=1.0, chunks=[0.1, 0.2, 0.3], tokens=3)
    late = {
        "error": {"message": "the deadline has passed", "code": 504, "reason": "deadline_exceeded"}
    }
    other = {"error": {"message": "broken", "code": 500, "reason": "internal_error"}}
    traces = [kept, *(asyncio.run(_ask("completions", [one]))[0] for one in (late, other))]
    assert [trace.refused for trace in traces] == [False, True, False]
    figures = bench_serve.summarise(traces, 2.0)
    assert (figures["requests"], figures["failed"], figures["refused"]) == (3, 1, 1)
    assert "1 failed, 1 refused for their targets" in bench_serve.render(figures)
    assert len(figures["errors"]) == 1
    assert bench_serve.goodput(traces, 2.0, {"ttft": 500.0})["share"] == pytest.approx(1 / 3)


async def _ask(
    client: str, events: list[dict[str, Any]], **how: Any
) -> tuple[ResponseTimes, dict[str, Any], str]:
    """What the client sends and makes of these events."""
    seen: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        seen.extend([json.loads(await reader.readexactly(length)), head.split()[1]])
        body = (
            b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
            + b"data: [DONE]\n\n"
        )
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        trace = await Client(url, "m", endpoint=client).complete("hello", 5, **how)
        return trace, seen[0], seen[1]
    finally:
        server.close()


def chat_chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def test_chats_are_asked_and_counted_like_completions() -> None:
    events = [
        chat_chunk(role="assistant", content=""),
        chat_chunk(content="a"),
        chat_chunk(content="b"),
    ]
    trace, body, path = asyncio.run(_ask("chat", [*events, chat_chunk("length"), USAGE]))
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in body
    assert body["ignore_eos"]
    assert (trace.error, trace.tokens, len(trace.chunks), trace.finish) == (None, 2, 2, "length")


def test_a_server_that_ignores_the_forced_end_fails_the_request() -> None:
    events = [{"choices": [{"text": "a", "finish_reason": None}]}, USAGE]
    trace, body, _ = asyncio.run(_ask("completions", events, forced_end=2))
    assert body["forced_end"] == 2
    assert "ignore_eos" not in body
    assert trace.error is None
    trace, _, _ = asyncio.run(_ask("completions", events, forced_end=3))
    assert "ignores forced_end" in (trace.error or "")
