"""Utilisation for Prometheus: what steps computed and read, at what pace, and as shares of this machine.

Owns the names. What is not known (an engine without a model, limits that nobody measured) is absent, not 0.
Must not know how anything was counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from pageturner.observe.work import MachineLimits, WorkTotals

HOW = "once `pageturner doctor` has measured this machine"
NAMES = tuple(one.name for one in fields(WorkTotals))


@dataclass(slots=True)
class Utilisation:
    """total: over all engine processes; lately: between the last two messages with steps between them."""

    total: WorkTotals = field(default_factory=WorkTotals)
    lately: WorkTotals = field(default_factory=WorkTotals)
    limits: MachineLimits | None = None
    _last: WorkTotals = field(default_factory=WorkTotals)

    def take(self, values: dict[str, float]) -> None:
        """A Stats message."""
        now = WorkTotals(*(values.get(name, 0.0) for name in NAMES))
        if now.step_seconds > self._last.step_seconds:
            self.lately = now.since(self._last)
            self.total = self.total.plus(self.lately)
            self._last = now

    def engine_lost(self) -> None:
        """The next one counts from zero."""
        self._last, self.lately = WorkTotals(), WorkTotals()

    def families(self, labels: dict[str, str]) -> Iterable[Any]:
        """Metric families of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def split(kind: Any, name: str, help: str, label: str, values: dict[str, float]) -> Any:
            names = [*labels, label] if label else list(labels)
            family = kind(f"pageturner:{name}", help, labels=names)
            for key, value in values.items():
                family.add_metric([*labels.values(), *([key] if label else [])], value)
            return family

        total, lately = self.total, self.lately
        if not total.step_seconds:
            return
        count, gauge = CounterMetricFamily, GaugeMetricFamily
        yield split(count, "step_seconds", "Seconds of all steps", "", {"": total.step_seconds})
        text = "Of these in forward passes and the choice of tokens"
        yield split(count, "kernel_seconds", text, "", {"": total.kernel_seconds})
        each = {"int8": total.int8_operations, "fp32": total.fp32_operations}
        yield split(count, "operations", "Of matrix products and attention, needed", "type", each)
        each = {"weights": total.weight_bytes, "kv": total.kv_bytes}
        yield split(count, "read_bytes", "Bytes that steps had to read, each once", "source", each)
        text = f"Shares of what this machine can do, over the time of the last steps; all of them {HOW}"
        yield split(gauge, "utilisation", text, "resource", lately.shares(self.limits))
        text = "GB/s read and GOP/s of products, over the time of the last steps"
        yield split(gauge, "achieved", text, "figure", lately.achieved)
        if self.limits is not None:
            known = {one.name: getattr(self.limits, one.name) for one in fields(MachineLimits)}
            each = {name: value for name, value in known.items() if value is not None}
            yield split(gauge, "machine_limit", "What this machine can do, same figures", "figure", each)
