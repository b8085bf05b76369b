"""Metrics as Prometheus reads them: gauges, counters and histograms, alone or one for each value of
labels.

Owns the way from numbers to that text, which prometheus_client writes. Must not know what is
counted. The library is imported when somebody first asks for the text: counting needs nothing of
it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from typing import Any

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# one number, or values of the labels -> number; a string alone where there is one label
Values = float | Mapping[Any, float]


class Histogram:
    """Counts by bucket, and the sum of all observations; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper end, observations up to it) of each bucket."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows


# name -> what it is, and the upper ends of its buckets
Declared = Mapping[str, tuple[str, tuple[float, ...]]]


class Histograms:
    """One histogram for each declared name."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._by_name = {name: Histogram(bounds) for name, (_, bounds) in declared.items()}

    def __getitem__(self, name: str) -> Histogram:
        return self._by_name[name]

    def share(self, name: str, other: str) -> None:
        """Show the histogram of this name under the other name too."""
        self._by_name[other] = self._by_name[name]

    def observe(self, name: str, value: float) -> None:
        self._by_name[name].observe(value)

    def expose(self, exposition: Exposition) -> None:
        for name, (help, _) in self._declared.items():
            exposition.histogram(name, help, self._by_name[name])


class Exposition:
    """One text, family by family. `common`: labels that every sample has in front of its own."""

    def __init__(self, common: Mapping[str, str] | None = None) -> None:
        self._common = dict(common or {})
        self._families: list[Any] = []

    def gauge(self, name: str, help: str, values: Values, *labels: str) -> None:
        self._add("GaugeMetricFamily", name, help, values, labels)

    def counter(self, name: str, help: str, values: Values, *labels: str) -> None:
        self._add("CounterMetricFamily", name, help, values, labels)

    def histogram(
        self, name: str, help: str, values: Histogram | Mapping[Any, Histogram], *labels: str
    ) -> None:
        self._add("HistogramMetricFamily", name, help, values, labels)

    def info(self, name: str, help: str, labels: Mapping[str, str]) -> None:
        """Settings, which are labels of a 1. They stand alone, without the common labels."""
        alone = Exposition()
        alone.gauge(name, help, {tuple(labels.values()): 1}, *labels)
        self._families += alone.collect()

    def _add(self, kind: str, name: str, help: str, values: Any, labels: tuple[str, ...]) -> None:
        from prometheus_client import core

        family = getattr(core, kind)(name, help, labels=[*self._common, *labels])
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            own = (key,) if isinstance(key, str) else key
            sample: tuple[Any, ...] = (value,)
            if isinstance(value, Histogram):
                sample = (value.cumulative(), value.sum)
            family.add_metric([*self._common.values(), *own], *sample)
        self._families.append(family)

    def collect(self) -> list[Any]:
        """Return all families in the order in which they were added, as prometheus_client asks for
        them."""
        return self._families

    def text(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


@cache
def _process() -> Any:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def process_metrics() -> bytes:
    """Return the process_* metrics that Prometheus asks of any process, here of the API process;
    nothing where there is no /proc."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_process()))
