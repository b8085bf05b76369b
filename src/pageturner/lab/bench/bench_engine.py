"""`pageturner bench engine`: the engine alone, offline, and where the time of a step goes.

A clock around every call into the backend tells the time inside native calls from the time outside:
planning, packing, sampling parameters, committing.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import replace
from typing import Any

from pageturner.config.flag_table import add_flags
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.lab.reporting import summary
from pageturner.lab.reporting.output import write_figures
from pageturner.lab.traffic.traffic import OpenLoop, encoded
from pageturner.lab.traffic.traffic_files import read_workload
from pageturner.lab.traffic.traffic_generators import word_prompts
from pageturner.progress import Progress
from pageturner.request import Event, Request
from pageturner.telemetry.work import WorkTotals

SETTINGS = (
    "model",
    "threads",
    "policy",
    "backend",
    "dtype",
    "device",
    "load_format",
    "load_seed",
    "max_num_seqs",
    "step_log",
)


class TimedOps:
    """A backend with a clock around each call. Delegates everything; `seconds` adds up."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return value(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(self, name, timed)  # the next call finds it without __getattr__
        return timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; engine settings are given as NAME=VALUE."""
    add_flags(parser, "bench engine")


def main(arguments: argparse.Namespace) -> int:
    figures = run(arguments)
    print(render(figures))
    if arguments.output:
        write_figures(arguments.output, figures)
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer the whole workload, all requests at once; figures of tokens and steps."""
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    config = EngineConfig(**settings, speculation="off")  # every step has all of its tokens
    clocks: list[TimedOps] = []

    def wrap(ops: Any) -> Any:
        clocks.append(TimedOps(ops))
        return clocks[0]

    built = make_engine(config, wrap)
    native = clocks[0] if clocks else TimedOps(None)
    requests = _requests(arguments)
    warm = [replace(request, prompt=(*request.prompt[:8], 7)) for request in requests[:2]]
    _drain(built.engine, [replace(r, params=replace(r.params, max_tokens=4)) for r in warm], native)
    native.seconds = 0.0
    built.engine.work = WorkTotals()
    steps, tokens = _drain(built.engine, requests, native)
    seconds = sum(step["seconds"] for step in steps)  # without what is measured between them
    return _figures(built, requests, steps, tokens, seconds)


def _requests(arguments: argparse.Namespace) -> list[Request]:
    if arguments.workload:
        each = read_workload(arguments.workload)
    else:
        each = word_prompts(arguments.num_prompts, arguments.input_len, arguments.output_len)
    tokenizer = load_tokenizer(hub.resolve(arguments.model).path, arguments.load_format)
    known = encoded(
        each, lambda text: tokenizer.encode(text, add_special=True, parse_special=False)
    )
    # every answer has all of its tokens, all at once: what is measured is the engine
    return OpenLoop([replace(one, output=None, arrival=0.0) for one in known]).engine_requests()


def _drain(
    engine: Engine, requests: list[Request], native: TimedOps
) -> tuple[list[dict[str, float]], int]:
    """Run until all are done: one record a step (rows, running, seconds, native seconds), tokens in
    all."""
    steps = []
    tokens = 0
    for request in requests:
        for event in engine.submit(request):
            raise SystemExit(f"request {event.id} was refused: {event.failure}")
    with Progress("tokens", sum(r.params.max_tokens or 0 for r in requests)) as line:
        while engine.scheduler.has_work:
            before, begin = native.seconds, time.perf_counter()
            events: list[Event] = engine.step()
            step_seconds = time.perf_counter() - begin
            tokens += sum(len(event.tokens) for event in events)
            stats = engine.scheduler.stats()
            kv = {name: value for name, value in stats.items() if name.startswith("kv_")}
            timed = {"seconds": step_seconds, "native": native.seconds - before}
            steps.append(timed | {"running": stats["running"], "tokens": float(len(events))} | kv)
            line.update(tokens)
    return steps, tokens


def _figures(
    built: LoadedEngine,
    requests: list[Request],
    steps: list[dict[str, float]],
    tokens: int,
    seconds: float,
) -> dict[str, Any]:
    outside = [1e3 * (step["seconds"] - step["native"]) for step in steps]
    full = max((step["running"] for step in steps), default=0.0)
    fullest = [o for o, step in zip(outside, steps, strict=True) if step["running"] == full]
    return {
        "requests": len(requests),
        "seconds": seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens_per_s": tokens / seconds,
        "steps": len(steps),
        "step_ms": summary.spread([1e3 * step["seconds"] for step in steps]),
        "native_ms": summary.spread([1e3 * step["native"] for step in steps]),
        "outside_ms": summary.spread(outside),
        "outside_ms_fullest": summary.spread(fullest),
        "most_running": full,
        "kv": _kv(steps),
        "used": _used(built),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load_s": built.phases,
        "fingerprint": built.fingerprint,
    }


def _used(built: LoadedEngine) -> dict[str, Any]:
    """Achieved figures, shares of this machine as far as its limits are known, and all in words."""
    usage, limits = built.engine.work, built.limits
    return {**usage.achieved, "shares": usage.shares(limits), "text": summary.used(usage, limits)}


def _kv(steps: list[dict[str, float]]) -> dict[str, float]:
    """KV memory over all steps, in tokens at the most and as shares of what was reserved."""
    names = ("kv_reserved", "kv_used", "kv_wasted", "kv_saved", "kv_contiguous")
    reserved, used, wasted, saved, contiguous = (
        sum(step[name] for step in steps) for name in names
    )
    return {
        "most_reserved": max((step["kv_reserved"] for step in steps), default=0.0),
        "most_saved": max((step["kv_saved"] for step in steps), default=0.0),
        "wasted": wasted / (reserved or 1.0),
        "saved": saved / ((reserved + saved) or 1.0),
        "wasted_contiguous": 1 - (used + saved) / (contiguous or 1.0),
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as a table for people."""
    names = ("step_ms", "native_ms", "outside_ms", "outside_ms_fullest")
    kv = figures["kv"]
    phases = ", ".join(f"{name} {value:.2f} s" for name, value in figures["load_s"].items())
    return "\n".join(
        [
            f"{figures['requests']} requests, {figures['output_tokens']} output tokens,"
            f" {figures['seconds']:.2f} s: {figures['output_tokens_per_s']:.1f} output tokens/s",
            summary.spreads_table(figures, names, f"{figures['steps']} steps"),
            f"most running at once {figures['most_running']:.0f}; peak RSS {figures['peak_rss_mb']:.0f} MB",
            f"KV: at most {kv['most_reserved']:,.0f} tokens reserved, {kv['wasted']:.1%} of them wasted"
            f" ({kv['wasted_contiguous']:.1%} if each reserved the longest sequence);"
            f" sharing saved {kv['saved']:.1%}",
            figures["used"]["text"],
            f"start: {phases}; {figures['fingerprint']}",
        ]
    )


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="pageturner bench engine")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
