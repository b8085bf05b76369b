"""Queue, prefill and decode of a request, out of its account; and what vLLM's own dashboards ask for."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageturner.request import Timings
from pageturner.server.observability.metrics import Metrics, render
from pageturner.server.observability.request_phases import QUEUE, PhaseMetrics, phases_of
from pageturner.text.output_stream import StreamTimes

from .conftest import Server
from .test_http import post

SPANS = ((1.0, 3.0, "queue_slots", 0), (3.0, 4.0, "prefill", 0), (4.0, 9.0, "decode", 0))
COMMON = {"model_name", "engine"}
# The names of samples that vLLM's dashboard (its file grafana.json, of 2026) asks for, panel by panel, and
# the labels of each beside model_name
ASKED: dict[str, set[str]] = {
    "vllm:e2e_request_latency_seconds_bucket": {"le"},
    "vllm:e2e_request_latency_seconds_sum": set(),
    "vllm:e2e_request_latency_seconds_count": set(),
    "vllm:prompt_tokens_total": set(),
    "vllm:generation_tokens_total": set(),
    "vllm:inter_token_latency_seconds_bucket": {"le"},
    "vllm:inter_token_latency_seconds_sum": set(),
    "vllm:inter_token_latency_seconds_count": set(),
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:time_to_first_token_seconds_bucket": {"le"},
    "vllm:time_to_first_token_seconds_sum": set(),
    "vllm:time_to_first_token_seconds_count": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:request_prompt_tokens_bucket": {"le"},
    "vllm:request_generation_tokens_bucket": {"le"},
    "vllm:request_success_total": {"finished_reason"},
    "vllm:request_queue_time_seconds_sum": set(),
    "vllm:request_prefill_time_seconds_sum": set(),
    "vllm:request_decode_time_seconds_sum": set(),
    "vllm:request_max_num_generation_tokens_sum": set(),
}
# beyond that dashboard: other names that vLLM has
MORE: dict[str, set[str]] = {
    "vllm:request_inference_time_seconds_bucket": {"le"},
    "vllm:request_time_per_output_token_seconds_bucket": {"le"},
    "vllm:iteration_tokens_total_bucket": {"le"},
    "vllm:iteration_tokens_total_sum": set(),
    "vllm:request_params_max_tokens_bucket": {"le"},
    "vllm:request_params_n_bucket": {"le"},
    "vllm:request_prefill_kv_computed_tokens_bucket": {"le"},
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:prefix_cache_queries_total": set(),
    "vllm:prefix_cache_hits_total": set(),
    "vllm:num_preemptions_total": set(),
    "vllm:time_per_output_token_seconds_bucket": {"le"},
    "vllm:gpu_cache_usage_perc": set(),
    "vllm:external_prefix_cache_queries_total": set(),
    "vllm:external_prefix_cache_hits_total": set(),
    "vllm:mm_cache_queries_total": set(),
    "vllm:mm_cache_hits_total": set(),
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:engine_sleep_state": {"sleep_state"},
    "http_requests_total": {"handler", "method", "status"},
    "http_request_duration_seconds_sum": {"handler", "method"},
    "process_resident_memory_bytes": set(),
    "process_cpu_seconds_total": set(),
}


def times(**settings: float) -> StreamTimes:
    timings = Timings(1.0, 9.5, {"queue_slots": 2.0, "own_decode": 5.0}, SPANS)
    return StreamTimes(arrival=0.5, submitted_at=0.75, engines=1, timings=timings, **settings)


def test_phases_follow_each_other() -> None:
    phases = phases_of(times(first_at=4.25, last_at=9.25))
    assert phases is not None
    assert (phases.queue, phases.prefill, phases.decode) == (2.25, 1.25, 5.0)


def test_a_request_without_a_token_has_no_decode() -> None:
    phases = phases_of(times())
    assert phases is not None
    assert (phases.queue, phases.prefill, phases.decode) == (2.25, 0.0, 0.0)


def test_after_a_restart_no_phase_is_negative() -> None:
    """The last engine began after the first token, which came from the engine before."""
    phases = phases_of(times(first_at=0.9, last_at=9.0))
    assert phases is not None
    assert (phases.queue, phases.prefill, phases.decode) == (
        pytest.approx(0.15),
        0.0,
        pytest.approx(8.1),
    )


def test_without_an_account_nothing_is_counted() -> None:
    metrics = PhaseMetrics()
    metrics.add_times(StreamTimes(0.0))
    assert sum(metrics.histograms[QUEUE].counts) == 0
    metrics.add_times(times(first_at=4.25, last_at=9.25))
    assert sum(metrics.histograms[QUEUE].counts) == 1
    assert metrics.seconds_by_part == {"queue_slots": 2.0, "own_decode": 5.0}


def test_tokens_of_steps_over_two_engines() -> None:
    metrics = Metrics()
    metrics.engine_stats({"steps_of_0": 3.0, "step_tokens": 3.0})
    metrics.engine_lost()
    metrics.engine_stats({"steps_of_0": 1.0, "steps_of_2": 2.0, "step_tokens": 33.0})
    families = text_string_to_metric_families(render(metrics, "m", True, {}).decode())
    name = "vllm:iteration_tokens_total"
    found = {
        (sample.name.removeprefix(name), sample.labels.get("le", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(name)
    }
    assert (found["_bucket", "1.0"], found["_bucket", "8.0"], found["_bucket", "16.0"]) == (4, 4, 6)
    assert (found["_count", ""], found["_sum", ""]) == (6, 36)


def test_every_query_of_vllms_dashboard_has_its_metric(server: Server) -> None:
    before = server.metric("vllm:request_params_n_count")
    assert post(server, prompt="ask", max_tokens=5, n=2).status_code == 200
    server.until(lambda: server.metric("vllm:request_params_n_count") == before + 1)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for name, own in (ASKED | MORE).items():
        assert labels.get(name, set()) >= own, name
        assert name.startswith(("process_", "http_")) or labels[name] >= {"model_name"}, name
