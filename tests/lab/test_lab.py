"""Workloads, figures, and the load client against a small server that misbehaves in known ways."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from pageturner import cli, progress
from pageturner.lab.bench import bench_engine, bench_serve
from pageturner.lab.bench.client import Client, ResponseTimes
from pageturner.lab.reporting import summary
from pageturner.lab.traffic.traffic_files import read_workload
from pageturner.lab.traffic.traffic_generators import word_prompts
from support.refusals import engine_fault


def test_percentiles_equal_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=101).tolist()
    for q in (0, 1, 37.5, 50, 90, 99, 100):
        assert summary.percentile(values, q) == pytest.approx(float(np.percentile(values, q)))
    assert np.isnan(summary.percentile([], 50))


def test_the_range_of_a_share() -> None:
    assert summary.share_range(99, 100) == pytest.approx([0.9455, 0.9982], 1e-4)


def test_the_mix_is_repeatable_and_as_asked() -> None:
    jobs = word_prompts(count=50, input_len=100, output_len=20, seed=3)
    assert jobs == word_prompts(count=50, input_len=100, output_len=20, seed=3)
    assert jobs != word_prompts(count=50, input_len=100, output_len=20, seed=4)
    lengths = [len(job.prompt.split()) for job in jobs]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert all(10 <= job.max_tokens <= 30 for job in jobs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ('{"prompt": "a"}', ":1: .*max_tokens"),
        ('{"prompt": "a", "max_tokens": 3}\n{"prompt": 7, "max_tokens": 3}', ":2: "),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be > 0"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": -1}', "arrival_s"),
        ("not json", ":1: "),
    ],
)
def test_bad_workloads_are_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(content)
    with engine_fault(message):
        read_workload(path)


def test_a_missing_workload_is_said(tmp_path: Path) -> None:
    with engine_fault("cannot read"):
        read_workload(tmp_path / "none.jsonl")


def event(text: str = "", finish: str | None = None, usage: dict | None = None) -> bytes:
    choices = [] if usage else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 3})
GOOD = [event("a"), event("b"), event("c"), event(finish="length"), USAGE, b"data: [DONE]\n\n"]


async def ask(
    answer: list[bytes], status: str = "200 OK", cut: int = 0, pause: float = 0.0
) -> ResponseTimes:
    """What the client makes of a server that answers so; `cut`: chunks of that many bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        assert body["stream"]
        assert body["max_tokens"] == 3
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        stream = b"".join(answer)
        pieces = [stream[i : i + cut] for i in range(0, len(stream), cut)] if cut else answer
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(pause)
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await Client(f"http://127.0.0.1:{port}/v1", "m").complete("hello", 3)
    finally:
        server.close()


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_the_client_reads_a_stream_however_it_is_cut(cut: int) -> None:
    trace = asyncio.run(ask(GOOD, cut=cut))
    assert trace.error is None
    assert "".join(trace.text) == "abc"
    assert (trace.prompt_tokens, trace.tokens, trace.finish) == (5, 3, "length")
    assert len(trace.chunks) == 3


def test_times_are_those_of_the_chunks() -> None:
    trace = asyncio.run(ask(GOOD, pause=0.02))
    assert trace.begin < trace.chunks[0] <= trace.chunks[1] <= trace.chunks[2] <= trace.end
    assert trace.tpot == pytest.approx((trace.chunks[2] - trace.chunks[0]) / 2)
    assert sum(trace.itl) == pytest.approx(trace.chunks[2] - trace.chunks[0])


def test_failures_are_in_the_trace() -> None:
    assert "HTTP 429" in (asyncio.run(ask([b"busy"], "429 Too Many")).error or "")
    assert "went wrong" in (
        asyncio.run(ask([b'data: {"error": {"message": "went wrong"}}\n\n'])).error or ""
    )
    assert "no token" in (asyncio.run(ask([b"data: [DONE]\n\n"])).error or "")
    refused = asyncio.run(Client("http://127.0.0.1:9", "m").complete("x", 3))
    assert refused.error is not None


def test_a_summary_counts_what_succeeded() -> None:
    good = ResponseTimes(begin=1.0, end=3.0, chunks=[1.5, 2.0, 3.0], prompt_tokens=7, tokens=3)
    bad = ResponseTimes(begin=1.0, end=1.1, error="HTTP 500: x")
    figures = bench_serve.summarise([good, bad], 2.0)
    assert figures["failed"] == 1
    assert figures["errors"] == ["HTTP 500: x"]
    assert figures["output_tokens_per_s"] == 1.5
    assert figures["ttft_ms"]["p50"] == pytest.approx(500)
    assert figures["tpot_ms"]["p50"] == pytest.approx(750)
    assert figures["itl_ms"]["max"] == pytest.approx(1000)
    assert "1 failed" in bench_serve.render(figures)


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "2"]) == 1
    )
    out, said = capsys.readouterr()
    assert "nan" not in out
    assert "http://127.0.0.1:9 answered no request" in said
    assert said.endswith("pageturner serve starts one; another address is given with --base-url\n")


def test_progress_without_a_terminal_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.01)
    said = ""
    with progress.Progress("requests", 3) as line:
        line.update(1)
        while said.count("1 of 3") < 2:  # though nothing new is told
            said += capsys.readouterr().err
        line.update(2, "late")
        while "late" not in said:
            said += capsys.readouterr().err
    assert "\npageturner: requests: 1 of 3 (0 s)\n" in "\n" + said
    assert "\npageturner: requests: 2 of 3, late (" in said
    capsys.readouterr()
    with progress.Progress("requests", 3, enabled=False) as line:
        line.update(1)
    assert capsys.readouterr().err == "", "where progress is not wanted"


def test_the_closed_loop_keeps_to_its_clients() -> None:
    class Counting:
        open = 0
        most = 0

        async def complete(
            self, prompt: str, max_tokens: int, forced_end: int | None
        ) -> ResponseTimes:
            self.open += 1
            self.most = max(self.most, self.open)
            await asyncio.sleep(0.001)
            self.open -= 1
            return ResponseTimes(begin=0.0, end=1.0, chunks=[0.5], tokens=1)

    client = Counting()
    jobs = word_prompts(20, 4, 4)
    line = progress.Progress("x", 20, enabled=False)
    traces = asyncio.run(bench_serve.closed_loop(client, jobs, 3, line))  # type: ignore[arg-type]
    assert len(traces) == 20
    assert client.most == 3


def test_bench_engine_counts_tokens_and_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    golden = Path(__file__).parent.parent / "goldens" / "tiny_llama.gguf"
    parser = argparse.ArgumentParser()
    bench_engine.add_arguments(parser)
    flags = ["--model", str(golden), "--num-prompts", "3", "--input-len", "6", "--output-len", "4"]
    figures = bench_engine.run(parser.parse_args([*flags, "--backend", "reference"]))
    expected = sum(job.max_tokens for job in word_prompts(3, 6, 4))
    assert figures["output_tokens"] == expected
    assert figures["most_running"] == 3
    assert figures["native_ms"]["mean"] < figures["step_ms"]["mean"]
    assert "output tokens/s" in bench_engine.render(figures)
    used = figures["used"]
    assert used["fp32_gop_s"] * figures["seconds"] > 1e-9 * figures["prompt_tokens"] * 81_920
    assert used["shares"].keys() == {"kernels"}, "nobody measures the limits of the reference"
    assert "for shares of this machine run `pageturner doctor` once" in bench_engine.render(figures)
