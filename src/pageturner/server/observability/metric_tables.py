"""The names of a server's metrics with their helps, labels and buckets, as metrics.json has them.

Owns the way from a figure by its short name to what Prometheus reads: vLLM's names and buckets
(vllm/v1/metrics/buckets.py), and a few of our own. Must not know where figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pageturner.http.prometheus import Exposition, Histograms, Values

TABLES: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("metrics.json").read_bytes())


def histograms_of(table: str) -> Histograms:
    """Return the histograms of a table, without any observation."""
    declared: dict[str, tuple[str, tuple[float, ...]]] = {
        name: (help, tuple(TABLES["buckets"][buckets]))
        for name, (help, buckets) in TABLES[table].items()
    }
    return Histograms(declared)


def expose(exposition: Exposition, figures: Mapping[str, Values]) -> None:
    """Add each of these gauges and counters, which are told apart by the tables."""
    for key, value in figures.items():
        gauge = TABLES["gauges"].get(key)
        name, help, *labels = gauge or TABLES["counters"][key]
        add = exposition.gauge if gauge else exposition.counter
        add(name, help, value, *labels)
