"""Metrics as Prometheus reads them: families of gauges, counters and histograms.

Owns the way from numbers to that text, which prometheus_client writes. Must not know what is counted. The
library is imported when somebody first asks for the text: counting needs nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# values of the labels -> value of the sample; a string alone where there is one label
Values = Mapping[Any, float]


class Exposition:
    """One text, family by family. `common`: labels that every sample has in front of its own."""

    def __init__(self, common: Mapping[str, str] | None = None) -> None:
        self._common = dict(common or {})
        self._families: list[Any] = []

    def gauge(self, name: str, help: str, value: float) -> None:
        self.gauges(name, help, (), {(): value})

    def gauges(self, name: str, help: str, labels: tuple[str, ...], values: Values) -> None:
        from prometheus_client.core import GaugeMetricFamily

        self._add(GaugeMetricFamily(name, help, labels=[*self._common, *labels]), values)

    def counter(self, name: str, help: str, value: float) -> None:
        self.counters(name, help, (), {(): value})

    def counters(self, name: str, help: str, labels: tuple[str, ...], values: Values) -> None:
        from prometheus_client.core import CounterMetricFamily

        self._add(CounterMetricFamily(name, help, labels=[*self._common, *labels]), values)

    def histogram(
        self, name: str, help: str, cumulative: list[tuple[str, float]], total: float
    ) -> None:
        """cumulative: upper end of each bucket, and observations up to it."""
        self.histograms(name, help, (), {(): (cumulative, total)})

    def histograms(
        self,
        name: str,
        help: str,
        labels: tuple[str, ...],
        values: Mapping[Any, tuple[list[tuple[str, float]], float]],
    ) -> None:
        """By values of the labels: upper end of each bucket with observations up to it, and their sum."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(name, help, labels=[*self._common, *labels])
        for key, (cumulative, total) in values.items():
            family.add_metric([*self._common.values(), *key], cumulative, total)
        self._families.append(family)

    def info(self, name: str, help: str, labels: Mapping[str, str]) -> None:
        """Settings, which are labels of a 1. They stand alone, without the common labels."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, help, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        self._families.append(family)

    def _add(self, family: Any, values: Values) -> None:
        for key, value in values.items():
            own = (key,) if isinstance(key, str) else key
            family.add_metric([*self._common.values(), *own], value)
        self._families.append(family)

    def text(self) -> bytes:
        """All families, in the order in which they were added."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._families))
        return generate_latest(registry)


class _Collected:
    """prometheus_client asks a collector for its families."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families
