"""`pageturner bench serve`: a load against any OpenAI-compatible server, and what its clients felt.

Closed loop: N clients, each sending its next request when its last is answered. With --arrivals the requests
are sent at the workload's own times instead (open loop).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from pageturner.lab import report, workload
from pageturner.lab.client import Client, Trace
from pageturner.lab.workload import Job
from pageturner.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="server to load")
    parser.add_argument("--model", default="smollm2", help="model name that requests carry")
    parser.add_argument("--api-key", default="", help="sent as a Bearer token")
    parser.add_argument(
        "--workload", type=Path, help="JSONL of prompt, max_tokens, arrival_s; default: a mix"
    )
    parser.add_argument("--num-prompts", type=int, default=64, help="requests of the built-in mix")
    parser.add_argument("--input-len", type=int, default=128, help="mean prompt length of the mix, in words")
    parser.add_argument("--output-len", type=int, default=64, help="mean answer length of the mix, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the mix")
    parser.add_argument("--concurrency", type=int, default=64, help="clients in the closed loop")
    parser.add_argument("--arrivals", action="store_true", help="open loop, at the workload's arrival times")
    parser.add_argument("--warmup", type=int, default=4, help="requests sent first and not counted")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")


def main(arguments: argparse.Namespace) -> int:
    jobs = _jobs(arguments)
    client = Client(arguments.base_url, arguments.model, api_key=arguments.api_key)
    traces, seconds = asyncio.run(_measure(client, jobs, arguments))
    figures = summarise(traces, seconds)
    print(render(figures))
    if arguments.output:
        report.write_json(arguments.output, figures)
    return 0 if not figures["failed"] else 1


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    if arguments.workload:
        return workload.load(arguments.workload)
    mix = workload.Mix(arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.seed)
    return mix.jobs()


async def _measure(
    client: Client, jobs: list[Job], arguments: argparse.Namespace
) -> tuple[list[Trace], float]:
    warm = workload.Mix(arguments.warmup, 32, 8, seed=99).jobs()
    await asyncio.gather(*(client.complete(job.prompt, job.max_tokens) for job in warm))
    with Progress("requests", len(jobs)) as line:
        begin = time.monotonic()
        if arguments.arrivals:
            traces = await open_loop(client, jobs, line)
        else:
            traces = await closed_loop(client, jobs, arguments.concurrency, line)
        return traces, time.monotonic() - begin


async def closed_loop(client: Client, jobs: list[Job], clients: int, line: Progress) -> list[Trace]:
    """`clients` requests open at any moment, until all jobs are done."""
    todo = iter(jobs)
    traces: list[Trace] = []

    async def work() -> None:
        for job in todo:
            traces.append(await client.complete(job.prompt, job.max_tokens))
            line.update(len(traces))

    await asyncio.gather(*(work() for _ in range(min(clients, len(jobs)))))
    return traces


async def open_loop(client: Client, jobs: list[Job], line: Progress) -> list[Trace]:
    """Each request at its arrival time, whatever the server does."""
    traces: list[Trace] = []

    async def work(job: Job) -> None:
        await asyncio.sleep(job.arrival_s)
        traces.append(await client.complete(job.prompt, job.max_tokens))
        line.update(len(traces))

    await asyncio.gather(*(work(job) for job in jobs))
    return traces


def summarise(traces: list[Trace], seconds: float) -> dict[str, Any]:
    """Tokens per second, and TTFT, TPOT, ITL, e2e in milliseconds."""
    good = [trace for trace in traces if trace.error is None]
    errors = sorted({trace.error for trace in traces if trace.error is not None})
    output = sum(trace.tokens for trace in good)
    prompt = sum(trace.prompt_tokens for trace in good)
    latencies = {
        "ttft_ms": [1e3 * t.ttft for t in good],
        "tpot_ms": [1e3 * t.tpot for t in good if t.tokens > 1],
        "itl_ms": [1e3 * gap for t in good for gap in t.itl],
        "e2e_ms": [1e3 * (t.end - t.begin) for t in good],
    }
    return {
        "requests": len(traces),
        "failed": len(traces) - len(good),
        "errors": errors[:5],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        **{name: report.spread(values) for name, values in latencies.items()},
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as a table for people."""
    names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [[name, *(figures[name][column] for column in columns)] for name in names]
    lines = [
        f"{figures['requests']} requests, {figures['failed']} failed, {figures['seconds']:.2f} s:"
        f" {figures['output_tokens_per_s']:.1f} output tokens/s, {figures['total_tokens_per_s']:.1f} in all",
        report.table(rows, ("", *columns)),
        *(f"error: {error}" for error in figures["errors"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="pageturner bench serve")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
