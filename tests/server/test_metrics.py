"""What becomes of the engine's counters in /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pageturner.server.observability.metrics import Metrics, render
from pageturner.telemetry.work import MachineLimits, WorkTotals

PREFIX = "vllm:spec_decode_num_"
COMMON = ("model_name", "engine")


def told(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, position) -> value of everything about drafts."""
    text = render(metrics, "m", True, {}).decode()
    return {
        (sample.name.removeprefix(PREFIX), sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def drafts(count: int, tokens: int, *accepted_at: int) -> dict[str, float]:
    """What an engine says of its drafts since its start; accepted_at: of their tokens by place."""
    at = {f"accepted_tokens_at_{i}": float(n) for i, n in enumerate(accepted_at)}
    return {"drafts": count, "draft_tokens": tokens, "accepted_tokens": sum(accepted_at), **at}


def test_drafts_by_vllms_names_over_two_engines() -> None:
    metrics = Metrics()
    metrics.engine_stats(drafts(1, 2, 1, 0))  # the first token of two was right
    metrics.engine_stats(drafts(3, 7, 2, 1, 1, 1))  # then all of four, and none of one
    metrics.engine_lost()
    metrics.engine_stats(drafts(1, 3, 1, 1, 0))  # of another engine: two of three
    accepted = {("accepted_tokens_per_pos_total", str(i)): n for i, n in enumerate((3, 2, 1, 1))}
    totals = {"drafts": 4, "draft_tokens": 10, "accepted_tokens": 7}
    assert told(metrics) == accepted | {(f"{name}_total", ""): n for name, n in totals.items()}


def test_without_drafts_there_are_no_positions() -> None:
    assert {position for _, position in told(Metrics())} == {""}


def used(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, its own label) -> value of everything about utilisation."""
    text = render(metrics, "m", True, {}).decode()
    names = (
        "step_seconds",
        "kernel_seconds",
        "operations",
        "read_bytes",
        "utilisation",
        "achieved",
    )
    return {
        (
            name.removesuffix("_total"),
            *(v for k, v in sample.labels.items() if k not in COMMON),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (name := sample.name.removeprefix("pageturner:")).startswith((*names, "machine_limit"))
    }


def test_utilisation_is_absent_until_it_is_known() -> None:
    metrics = Metrics()
    metrics.engine_stats({"steps": 3.0})
    assert used(metrics) == {}, "an engine that counts nothing"
    metrics.engine_stats(WorkTotals(2.0, 1.0, 4e9, 1e9, 3e9, 1e9).as_dict())
    assert used(metrics) == {
        ("step_seconds",): 2.0,
        ("kernel_seconds",): 1.0,
        ("operations", "int8"): 4e9,
        ("operations", "fp32"): 1e9,
        ("read_bytes", "weights"): 3e9,
        ("read_bytes", "kv"): 1e9,
        ("utilisation", "kernels"): 0.5,
        ("achieved", "read_gb_s"): 2.0,
        ("achieved", "int8_gop_s"): 2.0,
        ("achieved", "fp32_gop_s"): 0.5,
    }
    metrics.utilisation.limits = MachineLimits(20.0, 100.0, None)
    found = used(metrics)
    assert found["utilisation", "read"] == 0.1
    assert ("utilisation", "compute") not in found, (
        "fp32 products were made, and their limit is not known"
    )
    limits = {
        label: value
        for (name, *labels), value in found.items()
        if name == "machine_limit"
        for label in labels
    }
    assert limits == {"read_gb_s": 20.0, "int8_gop_s": 100.0}


def test_paces_are_those_of_the_last_steps_and_totals_of_all_engines() -> None:
    metrics = Metrics()
    metrics.engine_stats(WorkTotals(2.0, 1.0, 4e9, 0.0, 3e9, 1e9).as_dict())
    metrics.engine_stats(WorkTotals(3.0, 1.8, 5e9, 0.0, 9e9, 1e9).as_dict())
    metrics.engine_stats(WorkTotals(3.0, 1.8, 5e9, 0.0, 9e9, 1e9).as_dict())  # idle: no step since
    found = used(metrics)
    assert (found["achieved", "read_gb_s"], found["achieved", "int8_gop_s"]) == (6.0, 1.0)
    assert found["utilisation", "kernels"] == 0.8
    metrics.engine_lost()
    assert ("achieved", "read_gb_s") not in used(metrics)
    metrics.engine_stats(WorkTotals(1.0, 0.5, 1e9, 0.0, 2e9, 0.0).as_dict())
    found = used(metrics)
    assert (found["step_seconds",], found["read_bytes", "weights"]) == (4.0, 11e9)
    assert found["achieved", "read_gb_s"] == 2.0


def test_states_of_recurrent_layers_are_told_where_there_are_any() -> None:
    def states(metrics: Metrics) -> dict[str, float]:
        return {
            sample.labels.get("state", sample.name): sample.value
            for family in text_string_to_metric_families(render(metrics, "m", True, {}).decode())
            for sample in family.samples
            if sample.name.startswith(("pageturner:recurrent_states", "pageturner:state_hits"))
        }

    metrics = Metrics()
    assert states(metrics) == {"pageturner:state_hits_total": 0}
    figures = {"state_blocks_used": 2.0, "state_blocks_cached": 3.0, "state_blocks_total": 9.0}
    metrics.engine_stats(figures | {"state_hits": 4.0})
    metrics.engine_lost()
    metrics.engine_stats(figures | {"state_hits": 1.0})
    told = {"used": 2, "cached": 3, "total": 9, "pageturner:state_hits_total": 5}
    assert states(metrics) == told
