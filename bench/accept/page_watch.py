"""Watching: each panel of stored Grafana dashboards, such as those of vLLM, against /metrics under load; and
what a scrape costs.

Owns what is asked of a panel: every metric of its queries is there, with the labels that the query names, and
has counted something where it counts. The dashboards are named by PAGETURNER_GRAFANA_JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Line

VARIABLE = "PAGETURNER_GRAFANA_JSON"
METRIC = re.compile(r"\b((?:vllm|pageturner):\w+|(?:process|http)_\w+)(?:\{([^}]*)\})?")
SELECTED = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
SCRAPED = {"job", "instance"}  # labels that Prometheus gives
BY = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
REQUESTS = 4
MODEL = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
SCRAPES = 50
GROWING = ("_bucket", "_sum", "_count", "_total")
# what is 0 where nothing of the kind is served, in vLLM too: images, tiers below the KV cache, KV of others
IDLE = ("vllm:mm_cache_", "vllm:external_prefix_cache_", "vllm:num_preemptions")
Samples = dict[str, list[tuple[dict[str, str], float]]]  # by name: labels and value of each


def panels(dashboard: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Title and queries of each panel, those in folded rows too."""
    for panel in dashboard.get("panels", []):
        yield from panels(panel)
        queries = [target["expr"] for target in panel.get("targets", []) if "expr" in target]
        if queries:
            yield panel.get("title", "untitled"), queries


def samples(text: str) -> Samples:
    """What Prometheus would read."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def missing(query: str, found: Samples) -> list[str]:
    """What this query asks for and does not get."""
    labels = {
        label.strip() for group in BY.findall(query) for label in group.split(",") if label.strip()
    }
    lacks = []
    for name, selector in METRIC.findall(query):
        of, wanted = found.get(name, []), SELECTED.findall(selector)
        needed = (labels | {label for label, _, _ in wanted}) - SCRAPED
        exactly = {label: value for label, how, value in wanted if how == "=" and "$" not in value}
        fits = [
            value for own, value in of if own.keys() >= needed and own.items() >= exactly.items()
        ]
        if not fits and exactly != {
            "status": "5xx"
        }:  # a status that never was is no series, as everywhere
            lacks.append(f"{name} {sorted(needed)} {exactly or ''}" if of else name)
        elif (
            name.endswith(GROWING)
            and not any(value for _, value in of)
            and not name.startswith(IDLE)
        ):
            lacks.append(f"{name} is 0")
    return lacks


def ask(url: str, prompt: str, tokens: int) -> None:
    """One answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "model": MODEL.stem}
    harness.fetch(url, "/v1/completions", body)


def scrape(url: str) -> str:
    """What Prometheus is told."""
    return harness.fetch(url, "/metrics").decode()


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """One for each panel, and what watching costs."""
    paths = [
        path
        for path in (arguments.grafana_json or os.environ.get(VARIABLE) or "").split(os.pathsep)
        if path
    ]
    with harness.server(model=str(MODEL)) as server:
        for _ in range(REQUESTS):  # so that everything has been counted once
            ask(server.url, "hello there, " * 12, 20)  # more than a block, which the next ones find
        time.sleep(1.5)  # the engine tells its figures once a second
        found = samples(scrape(server.url))
        before = harness.processor_seconds(server.process.pid)
        for _ in range(SCRAPES):
            scrape(server.url)
        spent = harness.processor_seconds(server.process.pid) - before
    figure = f"{1000 * spent / SCRAPES:.2f} ms of the API process"
    yield Line("one scrape of /metrics", figure, None)
    for path in map(Path, paths):
        for title, queries in panels(json.loads(path.read_text())):
            lacks = sorted({one for query in queries for one in missing(query, found)})
            figure = f"missing: {', '.join(lacks)}" if lacks else f"{len(queries)} queries answered"
            yield Line(f"{path.stem}: panel {title!r}", figure, not lacks)
    if not paths:
        what = f"{VARIABLE} names no dashboard, such as a copy of vLLM's grafana.json"
        yield Line("vLLM's dashboard, panel by panel", what, None, run=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument(
        "--grafana-json",
        help=f"the dashboard, or several with {os.pathsep!r} between (default: ${VARIABLE})",
    )
