"""The traffic of `bench serve`: from its flags to requests, their times, and a sentence about both.

Owns the choice between workload file, trace and built-in mix, and between closed and open loop.
Must not know how requests are sent or measured.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageturner.config import flag_table
from pageturner.config.flag_table import FlagParser, check_range
from pageturner.errors import bad_setting
from pageturner.http.http_client import ConnectionLost, parse_address
from pageturner.lab.bench.client import CONNECT_TIMEOUT, get
from pageturner.lab.traffic.prompt_text import PromptWriter
from pageturner.lab.traffic.traffic import OpenLoop, TrafficRequest
from pageturner.lab.traffic.traffic_files import (
    TraceRow,
    TraceScaling,
    read_trace,
    read_workload,
    trace_requests,
)
from pageturner.lab.traffic.traffic_generators import poisson, word_prompts


@dataclass(frozen=True, slots=True)
class ServedTraffic:
    """Requests with text, whether each is sent at its own time (open loop) or when another was
    answered (closed loop), and what to say beside every figure."""

    requests: list[TrafficRequest]
    open: bool
    about: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the requests and their times."""
    flag_table.add_flags(parser, "load", "arrivals")
    add_trace_flags(parser.add_argument_group("traces"))


def add_load_flags(parser: FlagParser) -> None:
    """Add the flags of requests other than those of a trace."""
    flag_table.add_flags(parser, "load")


def add_trace_flags(parser: FlagParser) -> None:
    """Add the flags of a trace."""
    flag_table.add_flags(parser, "traces")


def from_flags(arguments: argparse.Namespace) -> ServedTraffic:
    """The traffic that the flags ask for. EngineFault for flags that contradict each other."""
    _check(arguments)
    traffic = _trace(arguments) if arguments.trace else _workload(arguments)
    if not arguments.request_rate:
        return traffic
    requests = poisson(traffic.requests, arguments.request_rate, arguments.seed)
    when = f"Poisson arrivals at {arguments.request_rate:g}/s, seed {arguments.seed}"
    return ServedTraffic(requests, True, f"{traffic.about}; {when}")


def _check(arguments: argparse.Namespace) -> None:
    check_range(arguments, "above 0", "rate_scale", "length_scale", "cap", "concurrency")
    if arguments.request_rate < 0 or arguments.num_prompts < 0:
        raise bad_setting("--request-rate and --num-prompts are 0 or more")
    check_load(arguments)
    if arguments.request_rate and (arguments.arrivals or arguments.rate_scale != 1.0):
        raise bad_setting(
            "--request-rate makes arrival times of its own: leave --arrivals and --rate-scale away"
        )


def check_load(arguments: argparse.Namespace) -> None:
    """EngineFault for flags of traces and workloads that contradict each other."""
    if arguments.trace and arguments.workload:
        raise bad_setting("give --trace or --workload, not both")
    if not arguments.trace and (arguments.oracle or arguments.length_scale != 1.0):
        raise bad_setting("--length-scale and --oracle go with --trace")


def _workload(arguments: argparse.Namespace) -> ServedTraffic:
    if arguments.workload:
        requests = read_workload(arguments.workload)
        about = f"{arguments.workload.name} (sha256 {file_digest(arguments.workload)}), {len(requests)} requests"
        if arguments.num_prompts and arguments.num_prompts < len(requests):
            requests = requests[: arguments.num_prompts]
            about += f", the first {len(requests)}"
    else:
        count = arguments.num_prompts or 64
        words, tokens = arguments.input_len, arguments.output_len
        requests = word_prompts(count, words, tokens, arguments.seed)
        about = f"mix of {count}, {words} words in, {tokens} tokens out, seed {arguments.seed}"
    if arguments.arrivals:
        requests = OpenLoop(requests).faster(arguments.rate_scale).requests
        about = f"{about}; open loop, recorded arrivals, rate x {arguments.rate_scale:g}"
        return ServedTraffic(requests, True, about)
    how = "open loop" if arguments.request_rate else f"closed loop of {arguments.concurrency}"
    return ServedTraffic(requests, False, f"{about}; {how}")


@dataclass(frozen=True, slots=True)
class FlaggedTrace:
    """The trace of --trace: all of its rows, how they are scaled, and the requests that fit, which
    have no text yet."""

    rows: list[TraceRow]
    scaling: TraceScaling
    requests: list[TrafficRequest]

    @property
    def left_out(self) -> str:
        """The number of its requests that do not fit, in words."""
        out = len(self.rows) - len(self.requests)
        return f"{out} left out as longer than {self.scaling.context or 'unknown'}"


def trace_from_flags(
    arguments: argparse.Namespace, context: int, rate: float = 1.0
) -> FlaggedTrace:
    """The trace of these flags at so many times its rate. context: most tokens of a request, 0:
    unknown. EngineFault where none of its requests fits."""
    rows = read_trace(arguments.trace, arguments.num_prompts, sessions=False)
    scaling = TraceScaling(
        length=arguments.length_scale,
        rate=rate,
        cap=arguments.cap,
        context=context,
        oracle=arguments.oracle,
    )
    requests = trace_requests(rows, scaling)
    if not requests:
        raise bad_setting(
            f"no request of the trace fits {scaling.context} tokens: lower --length-scale or --cap"
        )
    return FlaggedTrace(rows, scaling, requests)


def _trace(arguments: argparse.Namespace) -> ServedTraffic:
    context = arguments.max_model_len or _context(arguments.base_url, arguments.api_key)
    found = trace_from_flags(arguments, context, arguments.rate_scale)
    rows = found.rows
    scaling = found.scaling
    if rows[0].arrival_s is None and not arguments.request_rate:
        raise bad_setting(f"{arguments.trace.name} has no arrival times: give --request-rate")
    cut = sum(scaling.fits(row) and scaling.cuts(row) for row in rows)
    told = "ORACLE: the server is told every length" if scaling.oracle else "no oracle"
    about = (
        f"{arguments.trace.name} (sha256 {file_digest(arguments.trace)}), the first {len(rows)},"
        f" lengths x {scaling.length:g}, rate x {scaling.rate:g}, cap {scaling.cap} ({told});"
        f" {found.left_out},"
        f" {cut} answers cut by the cap; open loop"
    )
    requests = prompt_writer(arguments).written(found.requests)
    return ServedTraffic(requests, True, about)


def prompt_writer(arguments: argparse.Namespace) -> PromptWriter:
    """The writer of the prompts of a trace."""
    text = ""
    if arguments.text:
        try:
            text = arguments.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise bad_setting(f"cannot read {arguments.text}: {error}") from error
    tokenizer = None
    if arguments.tokenizer:
        from pageturner.formats import hub
        from pageturner.formats.load_tokenizer import load_tokenizer

        tokenizer = load_tokenizer(hub.resolve(arguments.tokenizer).path)
    return PromptWriter(text, tokenizer, arguments.seed)


def _context(base_url: str, api_key: str) -> int:
    """max_model_len of the server's first model, in tokens; 0 if it does not say."""
    try:
        _, body = asyncio.run(
            get(parse_address(base_url, "--base-url"), "/v1/models", api_key, CONNECT_TIMEOUT)
        )
        return int(msgspec.json.decode(body)["data"][0]["max_model_len"])
    except (ConnectionLost, msgspec.DecodeError, ValueError, LookupError, TypeError):
        return 0


def file_digest(path: Path) -> str:
    """The first digits of its SHA-256: enough to tell files apart."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
