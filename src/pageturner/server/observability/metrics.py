"""The metrics of a server, as Prometheus reads them: vLLM's names and buckets, and a few of our
own.

Owns the numbers; counting one costs a bisection and two additions. Must not know HTTP or the
engine's workings, nor how the text is written (metric_tables.py, prometheus.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from pageturner.http.http_metrics import HttpMetrics
from pageturner.http.prometheus import Exposition, Histogram, Histograms, Values, process_metrics
from pageturner.server.admission.goodput import Goodput
from pageturner.server.observability.metric_tables import TABLES, expose, histograms_of
from pageturner.server.observability.request_phases import COMPUTED, PhaseMetrics
from pageturner.server.observability.utilisation import Utilisation
from pageturner.telemetry.work import STEP_SIZES
from pageturner.text.output_stream import OutputStream

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"
SAME_BY_OLD_NAME = "vllm:time_per_output_token_seconds"
FINE_INTER_TOKEN = "pageturner:inter_token_latency_fine_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
LATENCY = "vllm:e2e_request_latency_seconds"
PROMPT_LENGTH = "vllm:request_prompt_tokens"
OUTPUT_LENGTH = "vllm:request_generation_tokens"
MAX_TOKENS = "vllm:request_params_max_tokens"
# counters of the engine (channel.Stats) -> name and help; each restarts from zero with the engine
# process
ENGINE_COUNTERS: dict[str, list[str]] = TABLES["engine_counters"]
MAX_FIGURES = 512  # of an engine
MAX_CODES = 128  # of refusals, each a label of its own
ACCEPTED_AT = "accepted_tokens_at_"  # and the position in the draft, from 0
STEPS_OF = "steps_of_"  # and the number of the bucket of STEP_SIZES
PLACES = (ACCEPTED_AT, STEPS_OF)
# gauges of the engine by the names that it has for them, too
ENGINE_GAUGES = ("backlog_tokens", "backlog_answer", "sessions", "session_blocks")
ADAPTER_GAUGES = ("adapters", "adapters_in_memory", "adapter_bytes", "adapters_waiting")
TIER_GAUGES = ("kv_host_bytes", "kv_file_bytes", "kv_file_state")
TIER_STATES = ("off", "reads", "writes")
FORECASTS = ("ttft_forecasts", "ttft_forecast_later", "ttft_forecast_log_error")


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

    histograms: Histograms = field(default_factory=lambda: histograms_of("answer_histograms"))
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

    def tiers(self) -> dict[str, Any]:
        """Return by KV tier what /server_info tells: hits, blocks stored, errors, and the blocks
        and bytes that are there. {} without tiers."""
        engine, counters = self.engine, self.counters
        if "kv_file_state" not in engine:
            return {}
        tiers: dict[str, Any] = {}
        for tier in ("host", "file"):
            tiers[tier] = {
                **{name: counters[f"kv_{tier}_{name}"] for name in ("hits", "stored", "errors")},
                **{name: int(engine.get(f"kv_{tier}_{name}", 0)) for name in ("blocks", "bytes")},
            }
        tiers["file"]["state"] = TIER_STATES[int(engine["kv_file_state"])]
        for name in ("late", "skipped"):
            tiers["file"][name] = counters[f"kv_file_{name}"]
        return tiers

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
    engine, counters, keys = metrics.engine, metrics.counters, keys or {}
    expose(exposition, _engine_figures(engine))
    exposition.info("vllm:cache_config_info", "KV cache settings", {**cache, "engine": "0"})
    for key, (name, help) in ENGINE_COUNTERS.items():
        exposition.counter(name, help, counters[key])
    steps = Histogram(tuple(map(float, STEP_SIZES)))
    steps.counts = [counters[f"{STEPS_OF}{i}"] for i in range(len(STEP_SIZES) + 1)]
    steps.sum = float(counters["step_tokens"])
    exposition.histogram("vllm:iteration_tokens_total", "Tokens computed in a step", steps)
    expose(exposition, _cache_figures(counters, int(cache.get("block_size", 1))))
    expose(exposition, _request_figures(metrics))
    expose(exposition, {"engine_up": float(healthy)})
    if healthy:  # else vLLM's board is to say that it is down, and not that it sleeps
        states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        expose(exposition, {"engine_sleep_state": states})
    figures: dict[str, Values] = {
        "engine_restarts": metrics.restarts,
        "engine_strikes": metrics.strikes,
        "poisoned_requests": metrics.poisoned,
        "resumed_streams": metrics.resumed,
        # by their tokens, and by their bytes
        "cut_readers": metrics.cut_readers + metrics.rejected["client_too_slow"],
        "key_open_cost": {key: cost for key, (cost, _) in keys.items()},
        "key_cost": {key: used for key, (_, used) in keys.items()},
    }
    expose(exposition, figures)
    if adapters is not None and adapters.by_name:
        expose(exposition, _adapter_figures(adapters, engine))
    expose(exposition, {name: engine[name] for name in TIER_GAUGES if name in engine})
    metrics.utilisation.expose(exposition)
    metrics.phases.expose(exposition)
    metrics.histograms.expose(exposition)
    return exposition.text() + metrics.http.text() + process_metrics()


def _adapter_figures(figures: AdapterFigures, engine: Mapping[str, float]) -> dict[str, Values]:
    """Return the figures of LoRA adapters, where there is one."""
    running, waiting = map(",".join, figures.at_work)
    return {
        **{name: engine.get(name, 0) for name in ADAPTER_GAUGES},
        "adapter_requests": {name: ended for name, (ended, _) in figures.by_name.items()},
        "adapter_generated_tokens": {name: n for name, (_, n) in figures.by_name.items()},
        "lora_requests_info": {(str(figures.most), running, waiting): time.time()},
    }


def _engine_figures(engine: Mapping[str, float]) -> dict[str, Values]:
    """Return the gauges of the engine, and what follows from them."""
    waiting, deferred = engine.get("waiting", 0), engine.get("deferred", 0)
    # the others only where layers have a window, or are recurrent
    kinds = ("blocks", "recent_blocks", "state_blocks")
    usage = max(
        engine.get(f"{kind}_used", 0) / (engine.get(f"{kind}_total", 0) or 1) for kind in kinds
    )
    states = ("reserved", "used", "wasted", "saved", "contiguous")
    figures: dict[str, Values] = {
        "running": engine.get("running", 0),
        "waiting": waiting,
        "waiting_by_reason": {"capacity": waiting - deferred, "deferred": deferred},
        "kv_cache_usage": usage,
        "gpu_cache_usage": usage,
        "kv_tokens": {state: engine.get(f"kv_{state}", 0) for state in states},
        **{name: engine.get(name, 0) for name in ENGINE_GAUGES},
    }
    if engine.get("state_blocks_total"):
        kept = ("used", "cached", "total")
        figures["recurrent_states"] = {kind: engine[f"state_blocks_{kind}"] for kind in kept}
    return figures


def _cache_figures(counters: Counter[str], block_size: int) -> dict[str, Values]:
    """Return the counters of drafts and caches, those of images too, for which vLLM's dashboards
    ask."""
    queries, hits = counters["prompt_tokens"], counters["cached_tokens"]
    # they are found in the cache then
    sent = min(hits, counters["kv_received_blocks"] * block_size)
    outside = (counters["kv_host_hits"] + counters["kv_file_hits"]) * block_size
    return {
        "accepted_per_position": {
            key.removeprefix(ACCEPTED_AT): n
            for key, n in counters.items()
            if key.startswith(ACCEPTED_AT)
        },
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "prompt_tokens_by_source": {
            "local_compute": queries - hits,
            "local_cache_hit": hits - sent,
            "external_kv_transfer": sent,
        },
        "external_prefix_cache_queries": outside + counters["kv_tier_misses"] * block_size,
        "external_prefix_cache_hits": outside,
        "mm_cache_queries": 0,
        "mm_cache_hits": 0,
    }


def _request_figures(metrics: Metrics) -> dict[str, Values]:
    """Return how requests ended, and whether their targets were met."""
    share, rate = metrics.goodput.last_minute(time.monotonic())
    return {
        "request_success": metrics.finished,
        "admission_rejections": metrics.rejected,
        "refusals": metrics.refused,
        "target_outcomes": metrics.goodput.outcomes,
        "goodput_ratio": share,
        "goodput_requests_per_second": rate,
        **{name: metrics.engine.get(name, 0) for name in FORECASTS},
    }
