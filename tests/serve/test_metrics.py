"""What becomes of the engine's counters in /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pageturner.core.stats import Counters
from pageturner.serve.metrics import Metrics, render

PREFIX = "vllm:spec_decode_num_"


def told(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, position) -> value of everything about drafts."""
    text = render(metrics, "m", True, {}).decode()
    return {
        (sample.name.removeprefix(PREFIX), sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def test_drafts_by_vllms_names_over_two_engines() -> None:
    metrics, counters = Metrics(), Counters()
    counters.count_draft(tokens=2, accepted=1)
    metrics.engine_stats(counters.as_dict())
    counters.count_draft(tokens=4, accepted=4)
    counters.count_draft(tokens=1, accepted=0)
    metrics.engine_stats(counters.as_dict())
    metrics.engine_lost()
    counters = Counters()
    counters.count_draft(tokens=3, accepted=2)
    metrics.engine_stats(counters.as_dict())
    accepted = {("accepted_tokens_per_pos_total", str(i)): n for i, n in enumerate((3, 2, 1, 1))}
    totals = {"drafts": 4, "draft_tokens": 10, "accepted_tokens": 7}
    assert told(metrics) == accepted | {(f"{name}_total", ""): n for name, n in totals.items()}


def test_without_drafts_there_are_no_positions() -> None:
    assert {position for _, position in told(Metrics())} == {""}
