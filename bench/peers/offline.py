"""What the in-process peers share: a workload in, figures out. Standard library only: it runs in their
environments, where Pageturner is not installed.

Owns the command line, the times of arrival and the figures, which have the names of `pageturner bench serve`.
A runner owns one engine: see run_openvino.py.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = [
    f"{word} " * 32 for word in ("harbour", "violet", "engine", "winter")
]  # unrelated to any workload
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Job:
    """One request, and what became of it. Times are time.perf_counter() seconds; `times`: of each token."""

    prompt: str
    max_tokens: int
    arrival_s: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    prompt_tokens: int = 0
    times: list[float] = field(default_factory=list)


Run = Callable[[list[Job]], None]


def main(
    start: Callable[[argparse.Namespace], AbstractContextManager[Run]],
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Load the engine by `start`, warm it up, run the workload, write the figures, let it go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument(
        "--workload", type=Path, required=True, help="JSONL of prompt, max_tokens, arrival_s"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the figures go")
    parser.add_argument("--limit", type=int, default=0, help="the first N requests; 0: all")
    parser.add_argument("--arrivals", action="store_true", help="at the workload's own times")
    parser.add_argument(
        "--rate-scale", type=float, default=1.0, help="arrival times are divided by it"
    )
    add_flags(parser)
    args = parser.parse_args()
    jobs = load(args.workload, args.limit, args.rate_scale if args.arrivals else 0.0)
    begin = time.perf_counter()
    with start(args) as run:
        load_s = time.perf_counter() - begin
        run([Job(prompt, WARM_UP_TOKENS) for prompt in WARM_UP])
        begin = time.perf_counter()
        run(jobs)
        seconds = time.perf_counter() - begin
    figures = summarise(jobs, seconds)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures |= {"started_s": load_s, "peak_rss_mb": peak_mb}
    args.output.write_text(json.dumps(figures, indent=2))
    if figures["failed"]:
        raise SystemExit(f"{figures['errors']}")


def load(path: Path, limit: int, rate_scale: float) -> list[Job]:
    """The jobs of a JSONL file. `rate_scale` 0: all arrive at once."""
    jobs = []
    for line in path.read_text(encoding="utf-8").splitlines()[: limit or None]:
        fields = json.loads(line)
        at = fields.get("arrival_s", 0.0) / rate_scale if rate_scale else 0.0
        jobs.append(Job(fields["prompt"], fields["max_tokens"], at))
    return sorted(jobs, key=lambda job: job.arrival_s)


def summarise(jobs: Sequence[Job], seconds: float) -> dict[str, object]:
    """As `pageturner.lab.bench.bench_serve.summarise`, of tokens that came one by one."""
    failed = sum(len(job.times) != job.max_tokens for job in jobs)
    good = [job for job in jobs if len(job.times) == job.max_tokens]
    output = sum(job.max_tokens for job in good)
    prompt = sum(job.prompt_tokens for job in good)
    gaps = [[b - a for a, b in zip(job.times, job.times[1:], strict=False)] for job in good]
    latencies = {
        "ttft_ms": [job.times[0] - job.begin for job in good],
        "tpot_ms": [sum(g) / len(g) for g in gaps if g],
        "itl_ms": [gap for g in gaps for gap in g],
        "e2e_ms": [job.end - job.begin for job in good],
    }
    return {
        "requests": len(jobs),
        "failed": failed,
        "refused": 0,  # nobody has targets here
        "errors": [f"{failed} answers have the wrong length"] if failed else [],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        **{name: spread([1e3 * value for value in values]) for name, values in latencies.items()},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99, max; percentiles by linear interpolation between closest ranks."""
    ordered = sorted(values) or [float("nan")]
    figures = {"mean": sum(ordered) / len(ordered)}
    for q in (50, 90, 99):
        place = (len(ordered) - 1) * q / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        figures[f"p{q}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return {**figures, "max": ordered[-1]}


def due(waiting: list[Job], begin: float) -> list[Job]:
    """Take those out of `waiting` (in order of arrival) whose time has come, and note when that was."""
    now = time.perf_counter()
    ready = []
    while waiting and begin + waiting[0].arrival_s <= now:
        ready.append(waiting.pop(0))
        ready[-1].begin = begin + ready[-1].arrival_s
    return ready


def sleep_until_next(waiting: list[Job], begin: float) -> None:
    """When nothing is left to do before the next arrival."""
    time.sleep(max(0.0, begin + waiting[0].arrival_s - time.perf_counter()))
