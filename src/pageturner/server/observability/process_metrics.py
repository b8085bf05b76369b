"""What Prometheus asks of any process (process_*): CPU time, memory, open files, start of the API process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@cache
def _registry() -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector  # when it is first asked for

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def text() -> bytes:
    """The process_* metrics in Prometheus' text format; empty where there is no /proc."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_registry()))
