"""What /metrics and /server_info tell of KV tiers: sums over engine processes, and nothing without tiers."""

from __future__ import annotations

from pageturner.server.observability.metrics import Metrics, render

FIGURES = {
    "kv_file_state": 2.0,
    "kv_file_hits": 7.0,
    "kv_file_errors": 1.0,
    "kv_file_blocks": 3.0,
    "kv_file_bytes": 300.0,
    "kv_host_hits": 5.0,
    "kv_host_bytes": 200.0,
}


def test_counts_go_on_when_the_engine_is_another() -> None:
    metrics = Metrics()
    metrics.engine_stats(FIGURES)
    metrics.engine_lost()
    metrics.engine_stats(FIGURES | {"kv_file_hits": 2.0, "kv_file_state": 1.0})
    told = metrics.tiers()
    assert told["file"]["hits"] == 9
    assert told["file"]["errors"] == 2
    assert told["file"]["bytes"] == 300
    assert told["file"]["state"] == "reads"
    assert told["host"]["hits"] == 10
    text = render(metrics, "m", True, {}).decode()
    assert 'pageturner:kv_file_hits_total{engine="0",model_name="m"} 9.0' in text
    assert 'pageturner:kv_file_bytes{engine="0",model_name="m"} 300.0' in text


def test_nothing_is_told_without_tiers() -> None:
    metrics = Metrics()
    metrics.engine_stats({"running": 1.0})
    assert metrics.tiers() == {}
    assert "kv_file_bytes" not in render(metrics, "m", True, {}).decode()
