"""`pageturner bench serve`: load any OpenAI-compatible server and measure what its clients see.

Closed loop: N clients, each sending its next request when its last is answered. Open loop: every
request at its time, whatever the server does: Poisson arrivals, the workload's own times, or a
recorded trace.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from math import inf
from typing import Any

from pageturner.config.flag_table import add_flags
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.bench.client import Client, ResponseTimes
from pageturner.lab.reporting import summary
from pageturner.lab.reporting.output import write_figures
from pageturner.lab.traffic import traffic_flags
from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_flags import ServedTraffic
from pageturner.lab.traffic.traffic_generators import word_prompts
from pageturner.progress import Progress, Still

UNREACHED = (
    ": is a server there? pageturner serve starts one; another address is given with --base-url"
)
FIELDS = {"ttft": "ttft_target_ms", "tpot": "tpot_target_ms", "e2e": "deadline_ms"}  # of a request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "server")
    traffic_flags.add_flags(parser)
    add_flags(parser, "bench serve")


def main(arguments: argparse.Namespace) -> int:
    targets = parse_targets(arguments.goodput)
    if arguments.send_targets and not targets:
        raise bad_setting("--send-targets sends those of --goodput: give some")
    traffic = traffic_flags.from_flags(arguments)
    client = Client(
        arguments.base_url,
        arguments.model,
        api_key=arguments.api_key,
        endpoint=arguments.endpoint,
        extra={FIELDS[name]: most for name, most in targets.items() if arguments.send_targets},
    )
    traces, seconds = asyncio.run(_measure(client, traffic, arguments))
    figures = {"load": f"{traffic.about}; {arguments.endpoint}", **summarise(traces, seconds)}
    if figures["failed"] == len(traces):
        why = "; ".join(figures["errors"])
        hint = UNREACHED if "ConnectionLost: Connect" in why else ""
        raise EngineFault("no_answer", f"{arguments.base_url} answered no request: {why}{hint}")
    if targets:
        figures["goodput"] = goodput(traces, seconds, targets)
    print(render(figures))
    if arguments.output:
        write_figures(arguments.output, figures)
    return 0 if not figures["failed"] else 1


async def _measure(
    client: Client, traffic: ServedTraffic, arguments: argparse.Namespace
) -> tuple[list[ResponseTimes], float]:
    warm = word_prompts(arguments.warmup, 32, 8, seed=99)
    with Still(lambda: f"warming up with {len(warm)} requests"):
        await asyncio.gather(*(client.complete(one.text, one.answer_length) for one in warm))
    with Progress("requests", len(traffic.requests)) as line:
        begin = time.monotonic()
        if traffic.open:
            times = await open_loop(client, traffic.requests, line)
        else:
            times = await closed_loop(client, traffic.requests, arguments.concurrency, line)
        return times, time.monotonic() - begin


async def closed_loop(
    client: Client, requests: list[TrafficRequest], clients: int, line: Progress
) -> list[ResponseTimes]:
    """`clients` requests open at any moment, until all are answered."""
    todo = iter(requests)
    times: list[ResponseTimes] = []

    async def work() -> None:
        for one in todo:
            times.append(await _complete(client, one))
            line.update(len(times))

    await asyncio.gather(*(work() for _ in range(min(clients, len(requests)))))
    return times


async def open_loop(
    client: Client, requests: list[TrafficRequest], line: Progress
) -> list[ResponseTimes]:
    """Each request at its arrival time, whatever the server does."""
    times: list[ResponseTimes] = []
    begin = time.monotonic()

    async def work(one: TrafficRequest) -> None:
        await asyncio.sleep(begin + one.arrival - time.monotonic())
        times.append(await _complete(client, one))
        line.update(len(times))

    await asyncio.gather(*(work(one) for one in requests))
    return times


async def _complete(client: Client, one: TrafficRequest) -> ResponseTimes:
    return await client.complete(one.text, one.max_tokens or one.answer_length, one.output)


def summarise(traces: list[ResponseTimes], seconds: float) -> dict[str, Any]:
    """Tokens per second, and TTFT, TPOT, ITL, e2e in milliseconds."""
    good = [trace for trace in traces if trace.error is None]
    refused = sum(trace.refused for trace in traces)
    errors = sorted(
        {trace.error for trace in traces if trace.error is not None and not trace.refused}
    )
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
        "failed": len(traces) - len(good) - refused,
        "refused": refused,
        "errors": errors[:5],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        **{name: summary.spread(values) for name, values in latencies.items()},
    }


def parse_targets(words: list[str]) -> dict[str, float]:
    """{"ttft": 500.0} of ["ttft:500"], in milliseconds. EngineFault for anything else."""
    targets: dict[str, float] = {}
    for word in words:
        name, _, value = word.replace("e2el:", "e2e:").partition(":")
        try:
            targets[name] = float(value)
        except ValueError:
            name = ""
        if name not in FIELDS or not 0 < targets[name] < inf:
            raise bad_setting(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, not {word!r}")
    return targets


def goodput(
    traces: list[ResponseTimes], seconds: float, targets: dict[str, float]
) -> dict[str, Any]:
    """Requests that met every target (DistServe's definition); one that failed, or was refused, met
    none."""

    def met(t: ResponseTimes) -> bool:
        reached = {"ttft": t.ttft, "tpot": t.tpot, "e2e": t.end - t.begin}
        return all(1e3 * reached[name] <= most for name, most in targets.items())

    good = sum(trace.error is None and met(trace) for trace in traces)
    return {
        "targets_ms": targets,
        "requests": good,
        "share": good / max(len(traces), 1),
        "requests_per_s": good / seconds,
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as a table for people."""
    names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    refused = f"{figures['refused']} refused for their targets, " if figures.get("refused") else ""
    lines = [
        *([figures["load"]] if "load" in figures else []),
        f"{figures['requests']} requests, {figures['failed']} failed, {refused}{figures['seconds']:.2f} s:"
        f" {figures['output_tokens_per_s']:.1f} output tokens/s, {figures['total_tokens_per_s']:.1f} in all",
        summary.spreads_table(figures, names, ""),
    ]
    if good := figures.get("goodput"):
        targets = " ".join(f"{name}:{most:g}" for name, most in good["targets_ms"].items())
        lines.append(
            f"goodput ({targets} ms): {good['requests_per_s']:.2f} requests/s,"
            f" {100 * good['share']:.1f} % of all"
        )
    return "\n".join([*lines, *(f"error: {error}" for error in figures["errors"])])


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="pageturner bench serve")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
