"""Watching: each panel of a stored Grafana dashboard, such as that of vLLM, against /metrics under load.

Owns what is asked of a panel: every metric of its queries is there, with the labels that the query names, and
has counted something where it counts. The dashboard is named by PAGETURNER_GRAFANA_JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import ROOT, Line, NotRun  # noqa: E402

VARIABLE = "PAGETURNER_GRAFANA_JSON"
METRIC = re.compile(r"\b((?:vllm|pageturner):\w+|process_\w+)")
BY = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
REQUESTS = 4
GROWING = ("_bucket", "_sum", "_count", "_total")
Samples = dict[str, list[tuple[set[str], float]]]  # by name: labels and value of each


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
            found.setdefault(sample.name, []).append((set(sample.labels), sample.value))
    return found


def missing(query: str, found: Samples) -> list[str]:
    """What this query asks for and does not get."""
    labels = {label.strip() for group in BY.findall(query) for label in group.split(",") if label.strip()}
    lacks = []
    for name in METRIC.findall(query):
        of = found.get(name, [])
        if not any(own >= labels for own, _ in of):
            lacks.append(f"{name} {sorted(labels)}" if of else name)
        elif name.endswith(GROWING) and not any(value for _, value in of):
            lacks.append(f"{name} is 0")
    return lacks


def load(url: str) -> None:
    """A few answers, so that everything has been counted once."""
    body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "model": "tiny_llama"}
    for _ in range(REQUESTS):
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(asked, timeout=60).read()


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """One for each panel."""
    path = arguments.grafana_json or os.environ.get(VARIABLE)
    if not path:
        raise NotRun(f"{VARIABLE} names no dashboard, such as a copy of vLLM's grafana.json")
    asked = list(panels(json.loads(Path(path).read_text())))
    with harness.server(model=str(ROOT / "tests" / "goldens" / "tiny_llama.gguf")) as server:
        load(server.url)
        time.sleep(1.5)  # the engine tells its figures once a second
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            found = samples(answer.read().decode())
    for title, queries in asked:
        lacks = [one for query in queries for one in missing(query, found)]
        figure = f"missing: {', '.join(lacks)}" if lacks else f"{len(queries)} queries answered"
        yield Line(f"panel {title!r}", figure, not lacks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--grafana-json", help=f"the dashboard (default: ${VARIABLE})")


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
