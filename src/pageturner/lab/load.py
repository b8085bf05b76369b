"""What is sent when: from the flags of `bench serve` to requests, their times, and a sentence about both.

Owns the choice between workload file, trace and built-in mix, and between closed and open loop. Must not know
how requests are sent or measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pageturner.errors import EngineFault
from pageturner.lab import arrivals, traces, workload
from pageturner.lab.traces import Prompts, Replay
from pageturner.lab.workload import Job


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, whether they come at their own times (open loop), and what to say beside every figure."""

    jobs: list[Job]
    open: bool
    about: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is sent, and when."""
    parser.add_argument(
        "--workload", type=Path, metavar="FILE", help="JSONL of prompt, max_tokens, arrival_s; default: a mix"
    )
    parser.add_argument(
        "--num-prompts", type=int, default=0, help="most requests; 0: 64 of the mix, all of a file"
    )
    parser.add_argument("--input-len", type=int, default=128, help="mean prompt length of the mix, in words")
    parser.add_argument("--output-len", type=int, default=64, help="mean answer length of the mix, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the mix, of random arrivals and of prompts")
    parser.add_argument("--concurrency", type=int, default=64, help="clients in the closed loop")
    parser.add_argument("--arrivals", action="store_true", help="open loop, at the workload's arrival times")
    parser.add_argument(
        "--request-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="open loop, Poisson arrivals, R requests a second",
    )
    parser.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="recorded arrival times are divided by X"
    )
    _add_trace_flags(parser.add_argument_group("traces"))


def _add_trace_flags(trace: argparse._ArgumentGroup) -> None:
    trace.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSONL(.gz) of arrival_s, prompt_tokens, output_tokens; open loop",
    )
    trace.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="lengths of prompts and answers are multiplied by X",
    )
    trace.add_argument(
        "--cap",
        type=int,
        default=512,
        metavar="N",
        help="max_tokens of every request: all that the server is told about lengths",
    )
    trace.add_argument(
        "--oracle",
        action="store_true",
        help="tell the server the true length instead: for servers without forced_end",
    )
    trace.add_argument("--text", type=Path, metavar="FILE", help="prompts are cut from this text")
    trace.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="model whose tokenizer counts the prompts' tokens; default: estimated",
    )
    trace.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="longer requests are left out; 0: what /v1/models says",
    )


def build(arguments: argparse.Namespace) -> Load:
    """The load that was asked for. EngineFault for flags that contradict each other."""
    _check(arguments)
    load = _trace(arguments) if arguments.trace else _workload(arguments)
    if not arguments.request_rate:
        return load
    jobs = poisson(load.jobs, arguments.request_rate, arguments.seed)
    when = f"Poisson arrivals at {arguments.request_rate:g}/s, seed {arguments.seed}"
    return Load(jobs, True, f"{load.about}; {when}")


def _check(arguments: argparse.Namespace) -> None:
    for name in ("rate_scale", "length_scale", "cap", "concurrency"):
        if not getattr(arguments, name) > 0:
            raise _bad(f"--{name.replace('_', '-')} is above 0, not {getattr(arguments, name)}")
    if arguments.request_rate < 0 or arguments.num_prompts < 0:
        raise _bad("--request-rate and --num-prompts are 0 or more")
    if arguments.trace and arguments.workload:
        raise _bad("give --trace or --workload, not both")
    if arguments.request_rate and (arguments.arrivals or arguments.rate_scale != 1.0):
        raise _bad("--request-rate makes arrival times of its own: leave --arrivals and --rate-scale away")
    if not arguments.trace and (arguments.oracle or arguments.length_scale != 1.0):
        raise _bad("--length-scale and --oracle go with --trace")


def _workload(arguments: argparse.Namespace) -> Load:
    if arguments.workload:
        jobs = workload.load(arguments.workload)
        about = f"{arguments.workload.name} (sha256 {_sha(arguments.workload)}), {len(jobs)} requests"
        if arguments.num_prompts and arguments.num_prompts < len(jobs):
            jobs = jobs[: arguments.num_prompts]
            about += f", the first {len(jobs)}"
    else:
        count = arguments.num_prompts or 64
        mix = workload.Mix(count, arguments.input_len, arguments.output_len, arguments.seed)
        jobs = mix.jobs()
        about = f"mix of {count}, {mix.input_len} words in, {mix.output_len} tokens out, seed {mix.seed}"
    if arguments.arrivals:
        jobs = [_later(job, job.arrival_s / arguments.rate_scale) for job in jobs]
        return Load(jobs, True, f"{about}; open loop, recorded arrivals, rate x {arguments.rate_scale:g}")
    how = "open loop" if arguments.request_rate else f"closed loop of {arguments.concurrency}"
    return Load(jobs, False, f"{about}; {how}")


def _trace(arguments: argparse.Namespace) -> Load:
    rows = traces.load(arguments.trace, arguments.num_prompts)
    if rows[0].arrival_s is None and not arguments.request_rate:
        raise _bad(f"{arguments.trace.name} has no arrival times: give --request-rate")
    context = arguments.max_model_len or _context(arguments.base_url, arguments.api_key)
    replay = Replay(arguments.length_scale, arguments.rate_scale, arguments.cap, context, arguments.oracle)
    jobs, out, cut = replay.jobs(rows, _prompts(arguments))
    if not jobs:
        raise _bad(f"no request of the trace fits {context} tokens: lower --length-scale or --cap")
    told = "ORACLE: the server is told every length" if replay.oracle else "no oracle"
    about = (
        f"{arguments.trace.name} (sha256 {_sha(arguments.trace)}), the first {len(rows)},"
        f" lengths x {replay.length_scale:g}, rate x {replay.rate_scale:g}, cap {replay.cap} ({told});"
        f" {out} left out as longer than {context or 'unknown'}, {cut} answers cut by the cap; open loop"
    )
    return Load(jobs, True, about)


def _prompts(arguments: argparse.Namespace) -> Prompts:
    text = ""
    if arguments.text:
        try:
            text = arguments.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad(f"cannot read {arguments.text}: {error}") from error
    tokenizer = None
    if arguments.tokenizer:
        from pageturner.files import hub
        from pageturner.files.load_tokenizer import load_tokenizer

        tokenizer = load_tokenizer(hub.resolve(arguments.tokenizer).path)
    return Prompts(text, tokenizer, arguments.seed)


def poisson(jobs: list[Job], rate: float, seed: int) -> list[Job]:
    """The same jobs with exponential gaps of mean 1 / rate seconds between them."""
    at = arrivals.times(rate, 1.0, seed)
    return [_later(job, next(at)) for job in jobs]


def _later(job: Job, at: float) -> Job:
    return msgspec.structs.replace(job, arrival_s=at)


def _context(base_url: str, api_key: str) -> int:
    """max_model_len of the server's first model, in tokens; 0 if it does not say."""
    parts = urlsplit(base_url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=10)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", parts.path.rstrip("/").removesuffix("/v1") + "/v1/models", headers=headers)
        return int(json.load(connection.getresponse())["data"][0]["max_model_len"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return 0
    finally:
        connection.close()


def _sha(path: Path) -> str:
    """The first digits: enough to tell files apart."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def _bad(message: str) -> EngineFault:
    return EngineFault("bad_setting", message)
