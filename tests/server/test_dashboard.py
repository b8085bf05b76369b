"""The dashboard in deploy/grafana asks for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pageturner.server.observability.metrics import Metrics, render

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "pageturner.json"


def test_every_metric_of_the_dashboard_exists() -> None:
    metrics = Metrics()
    metrics.engine_stats({"step_seconds": 1.0})
    text = render(metrics, "m", True, {}).decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    names = {name + end for name in families for end in ("", "_bucket", "_sum", "_count")}
    panels = json.loads(FILE.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:vllm|pageturner):\w+", query)}
    assert len(panels) >= 10
    assert asked - names == set()
