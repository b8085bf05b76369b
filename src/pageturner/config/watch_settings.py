"""WatchSettings: how a program that listens lets itself be watched, by its log.

Owns these settings, which `serve` and `route` have by inheritance, beside those of HTTP: of two
bases only one can have slots, which is theirs. Must not know what a setting does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.option import option


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Log and traces."""

    log_level: str = option("info", "verbosity", ("debug", "info", "warning", "error"))
    log_format: str = option(
        "text", "form of the log; json: an object a line, with request ids", ("text", "json")
    )
    otlp_traces_endpoint: str = option(
        "",
        "address of an OpenTelemetry collector, as http://localhost:4318/v1/traces, for a trace of each"
        " request; needs the extra otel",
    )
