"""The metrics of a server, as Prometheus reads them: vLLM's names and buckets, and a few of our
own.

Owns the numbers and their names, most of which are in metrics.json; counting one costs a bisection
and two additions. Must not know HTTP or the engine's workings, nor how the text is written
(prometheus.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from pageturner.http.http_metrics import HttpMetrics
from pageturner.http.prometheus import Exposition, Histogram, Histograms, process_metrics
from pageturner.server.admission.goodput import Goodput
from pageturner.server.observability.request_phases import COMPUTED, SECONDS, TOKENS, PhaseMetrics
from pageturner.server.observability.utilisation import Utilisation
from pageturner.telemetry.work import STEP_SIZES
from pageturner.text.output_stream import OutputStream

TABLES: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("metrics.json").read_bytes())
# vLLM's buckets (vllm/v1/metrics/buckets.py), in seconds; and finer ones for small models on a CPU
TTFT, ITL, FINE_ITL = (tuple(TABLES[name]) for name in ("ttft", "itl", "fine_itl"))

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"
SAME_BY_OLD_NAME = "vllm:time_per_output_token_seconds"
FINE_INTER_TOKEN = "pageturner:inter_token_latency_fine_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
LATENCY = "vllm:e2e_request_latency_seconds"
PROMPT_LENGTH = "vllm:request_prompt_tokens"
OUTPUT_LENGTH = "vllm:request_generation_tokens"
MAX_TOKENS = "vllm:request_params_max_tokens"
HISTOGRAMS = {
    FIRST_TOKEN: ("Time to first token", TTFT),
    INTER_TOKEN: ("Gap between two tokens", ITL),
    SAME_BY_OLD_NAME: ("The same, by vLLM's name of 2025", ITL),
    FINE_INTER_TOKEN: ("The same, finer", FINE_ITL),
    TPOT: ("Mean gap of a request", ITL),
    LATENCY: ("Arrival to last token", SECONDS),
    PROMPT_LENGTH: ("Prompt tokens of a request", TOKENS),
    OUTPUT_LENGTH: ("Output tokens of a request", TOKENS),
    MAX_TOKENS: ("max_tokens of a request", TOKENS),
}

# counters of the engine (channel.Stats) -> name and help; each restarts from zero with the engine
# process
ENGINE_COUNTERS: dict[str, list[str]] = TABLES["engine_counters"]
MAX_FIGURES = 512  # of an engine
MAX_CODES = 128  # of refusals, each a label of its own
ACCEPTED_AT = "accepted_tokens_at_"  # and the position in the draft, from 0
STEPS_OF = "steps_of_"  # and the number of the bucket of STEP_SIZES
PLACES = (ACCEPTED_AT, STEPS_OF)


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """most: in memory at once. by_name: requests that ended, and tokens of their answers. at_work:
    names of those that run, and of those that only wait."""

    most: int
    by_name: Mapping[str, tuple[int, int]]
    at_work: tuple[list[str], list[str]]


@dataclass(slots=True)
class Metrics:
    """All numbers of one server. `engine`: the latest gauges; `counters`: sums over all engine
    processes."""

    histograms: Histograms = field(default_factory=lambda: Histograms(HISTOGRAMS))
    finished: Counter[str] = field(
        default_factory=lambda: Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
    )
    rejected: Counter[str] = field(default_factory=lambda: Counter({"queue_full": 0}))
    # of all that was refused, those too, by code
    refused: Counter[str] = field(default_factory=Counter)
    goodput: Goodput = field(default_factory=Goodput)
    phases: PhaseMetrics = field(default_factory=PhaseMetrics)
    http: HttpMetrics = field(default_factory=HttpMetrics)
    cut_readers: int = 0
    restarts: int = 0
    strikes: int = 0
    poisoned: int = 0
    resumed: int = 0
    engine: dict[str, float] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    utilisation: Utilisation = field(default_factory=Utilisation)
    _last: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.histograms.share(INTER_TOKEN, SAME_BY_OLD_NAME)

    def ended(self, stream: OutputStream, now: float) -> None:
        """Count a choice that ended with an answer or an error. If a stop string ended it, its
        timings come later."""
        count, times = len(stream.tokens), stream.times
        self.finished[stream.finish or "error"] += 1
        self.goodput.ended(stream, now)
        self.histograms.observe(LATENCY, now - times.arrival)
        self.histograms.observe(PROMPT_LENGTH, len(stream.request.prompt))
        self.histograms.observe(OUTPUT_LENGTH, count)
        self.histograms.observe(MAX_TOKENS, stream.request.params.max_tokens or 0)
        self.phases.histograms.observe(COMPUTED, len(stream.request.prompt) - stream.cached)
        self.phases.add_times(times)
        if count > 1:
            self.histograms.observe(TPOT, (times.last_at - times.first_at) / (count - 1))

    def engine_stats(self, values: dict[str, float]) -> None:
        """Take a Stats message: gauges as they are, counters by what they grew. ValueError for a
        figure that is none."""
        if not all(map(isfinite, values.values())) or len(values) > MAX_FIGURES:
            raise ValueError("figures that are none")
        for name, value in values.items():
            known = name in ENGINE_COUNTERS or name in self.counters
            if known or (name.startswith(PLACES) and len(self.counters) < MAX_FIGURES):
                self.counters[name] += int(value - self._last.get(name, 0))
                self._last[name] = value
        self.engine = values
        self.utilisation.add_stats(values)

    def engine_lost(self) -> None:
        """The engine process is gone: its gauges are void and the next one counts from zero."""
        self.restarts += 1
        self.engine, self._last = {}, {}
        self.utilisation.engine_lost()

    def refuse(self, code: str) -> None:
        """Count a refused request by code. Beyond MAX_CODES, further codes are counted as
        "other"."""
        known = code in self.refused or len(self.refused) < MAX_CODES
        self.refused[code if known else "other"] += 1

    def tokens(self, gap: float) -> None:
        """One more token, `gap` seconds after the one before it."""
        for name in (INTER_TOKEN, FINE_INTER_TOKEN):
            self.histograms.observe(name, gap)


def render(
    metrics: Metrics,
    model: str,
    healthy: bool,
    cache: dict[str, str],
    keys: Mapping[str, tuple[int, int]] | None = None,
    adapters: AdapterFigures | None = None,
) -> bytes:
    """The Prometheus text.

    cache  labels of vllm:cache_config_info
    keys   by number of a key: what it has open may cost, and what all of its requests have cost, in
           tokens
    """
    exposition = Exposition({"model_name": model, "engine": "0"})
    _expose_engine(exposition, metrics, cache)
    _expose_states(exposition, metrics.engine)
    _expose_requests(exposition, metrics)
    exposition.gauge(
        "pageturner:engine_up", "1 while the engine process is there and moves", float(healthy)
    )
    if healthy:  # else vLLM's board is to say that it is down, and not that it sleeps
        states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        exposition.gauge("vllm:engine_sleep_state", "1 for what it does", states, "sleep_state")
    exposition.counter("pageturner:engine_restarts", "Engine processes lost", metrics.restarts)
    exposition.counter(
        "pageturner:engine_strikes",
        "Ends of the engine held against a request it computed",
        metrics.strikes,
    )
    exposition.counter(
        "pageturner:poisoned_requests", "Requests found to kill the engine", metrics.poisoned
    )
    exposition.counter(
        "pageturner:resumed_streams", "Streams taken up again after a restart", metrics.resumed
    )
    help = "Answers cut off because their clients read too slowly"
    # by their tokens, and by their bytes
    cut = metrics.cut_readers + metrics.rejected["client_too_slow"]
    exposition.counter("pageturner:cut_readers", help, cut)
    keys = keys or {}
    help = "Tokens that what each key has open may cost"
    exposition.gauge(
        "pageturner:key_open_cost", help, {key: one[0] for key, one in keys.items()}, "key"
    )
    help = "Tokens that the requests of each key were charged, less what was given back"
    exposition.gauge("pageturner:key_cost", help, {key: one[1] for key, one in keys.items()}, "key")
    if adapters is not None:
        _expose_adapters(exposition, adapters, metrics.engine)
    for name, help in TABLES["tier_gauges"].items():
        if name in metrics.engine:
            exposition.gauge(f"pageturner:{name}", help, metrics.engine[name])
    metrics.utilisation.expose(exposition)
    metrics.phases.expose(exposition)
    metrics.histograms.expose(exposition)
    return exposition.text() + metrics.http.text() + process_metrics()


def _expose_adapters(
    exposition: Exposition, figures: AdapterFigures, engine: Mapping[str, float]
) -> None:
    """The LoRA adapters, where there is one."""
    if not figures.by_name:
        return
    for name, help in TABLES["adapter_gauges"].items():
        exposition.gauge(f"pageturner:{name}", help, engine.get(name, 0))
    help = "Requests for each adapter that have ended"
    counts = {name: one[0] for name, one in figures.by_name.items()}
    exposition.counter("pageturner:adapter_requests", help, counts, "adapter")
    help = "Tokens generated with each adapter"
    counts = {name: one[1] for name, one in figures.by_name.items()}
    exposition.counter("pageturner:adapter_generated_tokens", help, counts, "adapter")
    running, waiting = map(",".join, figures.at_work)
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    help = "Adapters at work; the value is the time"
    exposition.gauge(
        "vllm:lora_requests_info",
        help,
        {(str(figures.most), running, waiting): time.time()},
        *labels,
    )


def _expose_states(exposition: Exposition, engine: dict[str, float]) -> None:
    """The states of recurrent layers, where there are any."""
    if not engine.get("state_blocks_total"):
        return
    states = {kind: engine[f"state_blocks_{kind}"] for kind in ("used", "cached", "total")}
    help = "Slots for states of recurrent layers"
    exposition.gauge("pageturner:recurrent_states", help, states, "state")


def _expose_engine(exposition: Exposition, metrics: Metrics, cache: dict[str, str]) -> None:
    """Add the figures of the engine, and what follows from them."""
    engine, counters = metrics.engine, metrics.counters
    exposition.gauge("vllm:num_requests_running", "Requests running", engine.get("running", 0))
    exposition.gauge("vllm:num_requests_waiting", "Requests waiting", engine.get("waiting", 0))
    deferred = engine.get("deferred", 0)
    reasons = {"capacity": engine.get("waiting", 0) - deferred, "deferred": deferred}
    help = "Requests waiting: for a place, or for a grammar, an adapter or KV"
    exposition.gauge("vllm:num_requests_waiting_by_reason", help, reasons, "reason")
    # the others only where layers have a window, or are recurrent
    kinds = ("blocks", "recent_blocks", "state_blocks")
    usage = max(
        engine.get(f"{kind}_used", 0) / (engine.get(f"{kind}_total", 0) or 1) for kind in kinds
    )
    exposition.gauge(
        "vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1, of the scarcer kind", usage
    )
    exposition.gauge("vllm:gpu_cache_usage_perc", "The same, by vLLM's name of 2025", usage)
    help = (
        "Tokens that the engine has yet to compute: prompts, and answers by their predicted lengths"
    )
    exposition.gauge("pageturner:predicted_tokens", help, engine.get("backlog_tokens", 0))
    help = "Predicted tokens of one answer, of those under way"
    exposition.gauge("pageturner:predicted_answer_tokens", help, engine.get("backlog_answer", 0))
    states = ("reserved", "used", "wasted", "saved", "contiguous")
    kv = {state: engine.get(f"kv_{state}", 0) for state in states}
    exposition.gauge("pageturner:kv_tokens", "KV memory of who runs, in tokens", kv, "state")
    for name, help in (
        ("sessions", "Sessions"),
        ("session_blocks", "KV blocks that sessions keep"),
    ):
        exposition.gauge(f"pageturner:{name}", help, engine.get(name, 0))
    exposition.info("vllm:cache_config_info", "KV cache settings", {**cache, "engine": "0"})
    for key, (name, help) in ENGINE_COUNTERS.items():
        exposition.counter(name, help, counters[key])
    places = {
        key.removeprefix(ACCEPTED_AT): n
        for key, n in counters.items()
        if key.startswith(ACCEPTED_AT)
    }
    name, help = (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts whose token at this place was right",
    )
    exposition.counter(name, help, places, "position")
    queries, hits = counters["prompt_tokens"], counters["cached_tokens"]
    exposition.counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries
    )
    exposition.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
    steps = Histogram(tuple(map(float, STEP_SIZES)))
    steps.counts = [counters[f"{STEPS_OF}{i}"] for i in range(len(STEP_SIZES) + 1)]
    steps.sum = float(counters["step_tokens"])
    exposition.histogram("vllm:iteration_tokens_total", "Tokens computed in a step", steps)
    block_size = int(cache.get("block_size", 1))
    # they are found in the cache then
    sent = min(hits, counters["kv_received_blocks"] * block_size)
    sources = {
        "local_compute": queries - hits,
        "local_cache_hit": hits - sent,
        "external_kv_transfer": sent,
    }
    help = "Prompt tokens: computed, cached, and computed by another engine"
    exposition.counter("vllm:prompt_tokens_by_source", help, sources, "source")
    _expose_other_caches(exposition, counters, block_size)


def _expose_other_caches(exposition: Exposition, counters: Counter[str], block_size: int) -> None:
    """Add the figures of the tiers below the KV cache, and of images, which vLLM's dashboards ask
    for."""
    hits = (counters["kv_host_hits"] + counters["kv_file_hits"]) * block_size
    queries = hits + counters["kv_tier_misses"] * block_size
    for name, help, value in (
        (
            "external_prefix_cache_queries",
            "Prompt tokens looked up in host memory and file",
            queries,
        ),
        ("external_prefix_cache_hits", "Prompt tokens found there", hits),
        ("mm_cache_queries", "Images looked up: none are taken", 0),
        ("mm_cache_hits", "Images found: none are taken", 0),
    ):
        exposition.counter(f"vllm:{name}", help, value)


def _expose_requests(exposition: Exposition, metrics: Metrics) -> None:
    """Add how requests ended, and whether their targets were met."""
    label = ("finished_reason",)
    exposition.counter("vllm:request_success", "Requests finished", metrics.finished, *label)
    exposition.counter("vllm:admission_rejections", "Requests refused", metrics.rejected, "reason")
    help = "Requests refused, whether they may be sent again or not, by the reason of the error"
    exposition.counter("pageturner:refusals", help, metrics.refused, "reason")
    help = "Requests that carried targets, by target (all: all of theirs) and outcome"
    outcomes = metrics.goodput.outcomes
    exposition.counter("pageturner:target_outcomes", help, outcomes, "target", "outcome")
    share, rate = metrics.goodput.last_minute(time.monotonic())
    engine = metrics.engine
    for name, help, value in (
        (
            "goodput_ratio",
            "Share of the last minute's requests with targets that met all of theirs",
            share,
        ),
        (
            "goodput_requests_per_second",
            "Requests a second that met them, in the last minute",
            rate,
        ),
        (
            "ttft_forecasts",
            "Requests let in upon a forecast of their TTFT",
            engine.get("ttft_forecasts", 0),
        ),
        (
            "ttft_forecast_later",
            "Share of them later than foretold",
            engine.get("ttft_forecast_later", 0),
        ),
        (
            "ttft_forecast_log_error",
            "Mean |ln(true / foretold TTFT)|",
            engine.get("ttft_forecast_log_error", 0),
        ),
    ):
        exposition.gauge(f"pageturner:{name}", help, value)
