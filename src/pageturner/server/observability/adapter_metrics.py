"""The metrics of LoRA adapters.

Owns their names, those of vLLM among them. Must not know how they come about.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pageturner.http.prometheus import Exposition

GAUGES = {
    "adapters": "LoRA adapters that requests can ask for",
    "adapters_in_memory": "LoRA adapters in memory",
    "adapter_bytes": "Bytes that they take",
    "adapters_waiting": "Requests that wait for their adapter",
}


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """most: in memory at once. by_name: requests that ended, and tokens of their answers. at_work: names of
    those that run, and of those that only wait."""

    most: int
    by_name: Mapping[str, tuple[int, int]]
    at_work: tuple[list[str], list[str]]


def expose(exposition: Exposition, figures: AdapterFigures, engine: Mapping[str, float]) -> None:
    """All of them, where there is an adapter."""
    if not figures.by_name:
        return
    for name, help in GAUGES.items():
        exposition.gauge(f"pageturner:{name}", help, engine.get(name, 0))
    help = "Requests for each adapter that have ended"
    counts = {name: one[0] for name, one in figures.by_name.items()}
    exposition.counters("pageturner:adapter_requests", help, ("adapter",), counts)
    help = "Tokens generated with each adapter"
    counts = {name: one[1] for name, one in figures.by_name.items()}
    exposition.counters("pageturner:adapter_generated_tokens", help, ("adapter",), counts)
    running, waiting = map(",".join, figures.at_work)
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    help = "Adapters at work; the value is the time"
    exposition.gauges(
        "vllm:lora_requests_info",
        help,
        labels,
        {(str(figures.most), running, waiting): time.time()},
    )
