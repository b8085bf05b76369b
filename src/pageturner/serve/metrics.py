"""What the server counts, and how Prometheus reads it: vLLM's names and buckets, and a few of our own.

Owns the numbers; counting one costs a bisection and two additions. Must not know HTTP or the engine's
workings. prometheus_client is imported when somebody first asks for the text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pageturner.serve.goodput import Goodput
from pageturner.serve.utilisation import Utilisation

# vLLM's buckets (vllm/v1/metrics/buckets.py), in seconds
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
        40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
# finer than theirs, for small models on a CPU: ours
FINE_ITL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

# counters of the engine (channel.Stats) -> name and help; each restarts from zero with the engine process
ENGINE_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens processed"),
    "generated_tokens": ("vllm:generation_tokens", "Tokens generated"),
    "cached_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache"),
    "preemptions": ("vllm:num_preemptions", "Preemptions"),
    "drafts": ("vllm:spec_decode_num_drafts", "Drafts that were verified"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts that were verified"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were right"),
    "steps": ("pageturner:steps", "Steps run"),
    "step_tokens": ("pageturner:step_tokens", "Tokens computed in steps"),
    "recomputed_tokens": (
        "pageturner:recomputed_tokens",
        "Tokens computed again after preemption or a restart",
    ),
}
ACCEPTED_AT = "accepted_tokens_at_"  # and the position in the draft, from 0


class Histogram:
    """Counts by bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end, observations up to it), as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows


@dataclass(slots=True)
class Metrics:
    """All numbers of one server. `engine`: the latest gauges; `counters`: sums over all engine processes."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT))
    inter_token: Histogram = field(default_factory=lambda: Histogram(ITL))
    fine_inter_token: Histogram = field(default_factory=lambda: Histogram(FINE_ITL))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(ITL))
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    most_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    finished: Counter[str] = field(
        default_factory=lambda: Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
    )
    rejected: Counter[str] = field(default_factory=lambda: Counter({"queue_full": 0}))
    goodput: Goodput = field(default_factory=Goodput)
    restarts: int = 0
    poisoned: int = 0
    resumed: int = 0
    engine: dict[str, float] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    used: Utilisation = field(default_factory=Utilisation)
    _last: dict[str, float] = field(default_factory=dict)

    def engine_stats(self, values: dict[str, float]) -> None:
        """Take a Stats message: gauges as they are, counters by what they grew."""
        for name, value in values.items():
            if name in ENGINE_COUNTERS or name.startswith(ACCEPTED_AT):
                self.counters[name] += int(value - self._last.get(name, 0))
                self._last[name] = value
        self.engine = values
        self.used.take(values)

    def engine_lost(self) -> None:
        """The engine process is gone: its gauges are void and the next one counts from zero."""
        self.restarts += 1
        self.engine, self._last = {}, {}
        self.used.engine_lost()

    def tokens(self, gap: float) -> None:
        """One more token, `gap` seconds after the one before it."""
        self.inter_token.observe(gap)
        self.fine_inter_token.observe(gap)


def render(metrics: Metrics, model: str, healthy: bool, cache: dict[str, str]) -> bytes:
    """The Prometheus text. `cache`: labels of vllm:cache_config_info."""
    return exposition(_families(metrics, model, healthy, cache))


def exposition(families: Iterable[Any]) -> bytes:
    """Metric families of prometheus_client as their text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(families)))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _families(metrics: Metrics, model: str, healthy: bool, cache: dict[str, str]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names, values = ["model_name", "engine"], [model, "0"]

    def gauge(name: str, help: str, value: float) -> Any:
        family = GaugeMetricFamily(name, help, labels=names)
        family.add_metric(values, value)
        return family

    def counter(name: str, help: str, value: float) -> Any:
        family = CounterMetricFamily(name, help, labels=names)
        family.add_metric(values, value)
        return family

    def split(name: str, help: str, label: str, counts: Counter[str]) -> Any:
        family = CounterMetricFamily(name, help, labels=[*names, label])
        for key, count in counts.items():
            family.add_metric([*values, key], count)
        return family

    engine = metrics.engine
    yield gauge("vllm:num_requests_running", "Requests running", engine.get("running", 0))
    yield gauge("vllm:num_requests_waiting", "Requests waiting", engine.get("waiting", 0))
    kinds = ("blocks", "recent_blocks")  # the second only where layers have a window
    usage = max(engine.get(f"{kind}_used", 0) / (engine.get(f"{kind}_total", 0) or 1) for kind in kinds)
    yield gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1, of the scarcer kind", usage)
    kv = GaugeMetricFamily(
        "pageturner:kv_tokens", "KV memory of who runs, in tokens", labels=[*names, "state"]
    )
    for state in ("reserved", "used", "wasted", "saved", "contiguous"):
        kv.add_metric([*values, state], engine.get(f"kv_{state}", 0))
    yield kv
    info = GaugeMetricFamily("vllm:cache_config_info", "KV cache settings", labels=[*cache, "engine"])
    info.add_metric([*cache.values(), "0"], 1)
    yield info
    for key, (name, help) in ENGINE_COUNTERS.items():
        yield counter(name, help, metrics.counters[key])
    accepted = {key: n for key, n in metrics.counters.items() if key.startswith(ACCEPTED_AT)}
    places = Counter({key.removeprefix(ACCEPTED_AT): n for key, n in accepted.items()})
    name, help = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts whose token at this place was right"
    yield split(name, help, "position", places)
    queries = metrics.counters["prompt_tokens"]
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries)
    hits = metrics.counters["cached_tokens"]
    yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
    sources = Counter({"local_compute": queries - hits, "local_cache_hit": hits})
    yield split("vllm:prompt_tokens_by_source", "Prompt tokens, computed and cached", "source", sources)
    yield split("vllm:request_success", "Requests finished", "finished_reason", metrics.finished)
    yield split("vllm:admission_rejections", "Requests refused", "reason", metrics.rejected)
    yield from _goodput(metrics, names, values)
    yield gauge("pageturner:engine_up", "1 while the engine process is there and moves", float(healthy))
    yield counter("pageturner:engine_restarts", "Engine processes lost", metrics.restarts)
    yield counter("pageturner:poisoned_requests", "Requests found to kill the engine", metrics.poisoned)
    yield counter("pageturner:resumed_streams", "Streams taken up again after a restart", metrics.resumed)
    yield from metrics.used.families(dict(zip(names, values, strict=True)))
    for name, help, histogram in _histograms(metrics):
        family = HistogramMetricFamily(name, help, labels=names)
        family.add_metric(values, histogram.cumulative(), histogram.sum)
        yield family


def _goodput(metrics: Metrics, names: list[str], values: list[str]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    help = "Requests that carried targets, by target (all: all of theirs) and outcome"
    family = CounterMetricFamily("pageturner:target_outcomes", help, labels=[*names, "target", "outcome"])
    for (target, outcome), count in metrics.goodput.outcomes.items():
        family.add_metric([*values, target, outcome], count)
    yield family
    share, rate = metrics.goodput.lately(time.monotonic())
    engine = metrics.engine
    for name, help, value in (
        ("goodput_ratio", "Share of the last minute's requests with targets that met all of theirs", share),
        ("goodput_requests_per_second", "Requests a second that met them, in the last minute", rate),
        ("ttft_forecasts", "Requests let in upon a forecast of their TTFT", engine.get("ttft_forecasts", 0)),
        ("ttft_forecast_later", "Share of them later than foretold", engine.get("ttft_forecast_later", 0)),
        (
            "ttft_forecast_log_error",
            "Mean |ln(true / foretold TTFT)|",
            engine.get("ttft_forecast_log_error", 0),
        ),
    ):
        gauge = GaugeMetricFamily(f"pageturner:{name}", help, labels=names)
        gauge.add_metric(values, value)
        yield gauge


def _histograms(metrics: Metrics) -> list[tuple[str, str, Histogram]]:
    return [
        ("vllm:time_to_first_token_seconds", "Time to first token", metrics.time_to_first_token),
        ("vllm:inter_token_latency_seconds", "Gap between two tokens", metrics.inter_token),
        ("pageturner:inter_token_latency_fine_seconds", "The same, finer", metrics.fine_inter_token),
        (
            "vllm:request_time_per_output_token_seconds",
            "Mean gap of a request",
            metrics.per_output_token,
        ),
        ("vllm:e2e_request_latency_seconds", "Arrival to last token", metrics.latency),
        ("vllm:request_prompt_tokens", "Prompt tokens of a request", metrics.prompt_lengths),
        ("vllm:request_generation_tokens", "Output tokens of a request", metrics.output_lengths),
        ("vllm:request_params_max_tokens", "max_tokens of a request", metrics.most_tokens),
    ]
