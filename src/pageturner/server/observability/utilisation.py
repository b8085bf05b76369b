"""Utilisation for Prometheus: what steps computed and read, at what pace, and as shares of this
machine.

Owns the names. What is not known (an engine without a model, limits that nobody measured) is
absent, not 0. Must not know how anything was counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pageturner.http.prometheus import Exposition, Values
from pageturner.server.observability.metric_tables import expose
from pageturner.telemetry.work import MachineLimits, WorkTotals

NAMES = tuple(one.name for one in fields(WorkTotals))


@dataclass(slots=True)
class Utilisation:
    """total: over all engine processes; lately: between the last two messages with steps between
    them."""

    total: WorkTotals = field(default_factory=WorkTotals)
    lately: WorkTotals = field(default_factory=WorkTotals)
    limits: MachineLimits | None = None
    _last: WorkTotals = field(default_factory=WorkTotals)

    def add_stats(self, values: dict[str, float]) -> None:
        """A Stats message."""
        now = WorkTotals(*(values.get(name, 0.0) for name in NAMES))
        if now.step_seconds > self._last.step_seconds:
            self.lately = now.since(self._last)
            self.total = self.total.plus(self.lately)
            self._last = now

    def engine_lost(self) -> None:
        """The next one counts from zero."""
        self._last, self.lately = WorkTotals(), WorkTotals()

    def expose(self, exposition: Exposition) -> None:
        """Add what is known."""
        total, lately = self.total, self.lately
        if not total.step_seconds:
            return
        figures: dict[str, Values] = {
            "step_seconds": total.step_seconds,
            "kernel_seconds": total.kernel_seconds,
            "operations": {"int8": total.int8_operations, "fp32": total.fp32_operations},
            "read_bytes": {"weights": total.weight_bytes, "kv": total.kv_bytes},
            "utilisation": lately.shares(self.limits),
            "achieved": lately.achieved,
        }
        if self.limits is not None:
            known = {one.name: getattr(self.limits, one.name) for one in fields(MachineLimits)}
            limits = {name: value for name, value in known.items() if value is not None}
            figures["machine_limit"] = limits
        expose(exposition, figures)
