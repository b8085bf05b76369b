"""The process_* metrics stand beside the server's own, in text that Prometheus' own parser reads."""

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageturner.server.observability.metrics import Metrics, render


@pytest.mark.skipif(sys.platform != "linux", reason="process_* are read from /proc")
def test_process_metrics_are_exposed_and_parse() -> None:
    text = render(Metrics(), "tiny", True, {}).decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("process_")
    }
    assert samples["process_resident_memory_bytes"] > 1e6
    assert samples["process_cpu_seconds_total"] > 0
    assert samples["process_start_time_seconds"] > 1e9
