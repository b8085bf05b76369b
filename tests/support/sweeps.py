"""Sweeps that were never measured: figures of runs, and what is found of them."""

from __future__ import annotations

from typing import Any

from pageturner.lab.bench import sweep
from pageturner.lab.bench.sweep import LoadSweep, SweepPoint, SweepResults, SweptServer


def figures(speed: float, late: float = 10.0, **more: Any) -> dict[str, Any]:
    """Those of one run."""
    latencies = {name: late for name in sweep.FIGURES if "_ms_" in name}
    counts = dict.fromkeys(sweep.COUNTS, 5) | {"errors": 0, "refused": 0, "unanswered": 0}
    other = {
        "goodput_share": 0.9,
        "goodput_per_s": speed / 9,
        "prompt_tokens": 9.0,
        "answer_tokens": 8.0,
        "asked_tokens": 8.0,
    }
    return {
        **counts,
        **other,
        **latencies,
        "messages": [],
        "output_tokens_per_s": speed,
        "requests_per_s": speed / 8,
        "lengths": [[9, 8]] * 5,
        **more,
    }


FAILED = {"answered": 0, "errors": 5, "messages": ["HTTP 500: <b>no</b>"]}


def results(**more: Any) -> SweepResults:
    """Two servers, one of which failed, and a forecast."""
    evil = 'evil "<script>alert(1)</script>&'
    points = [
        SweepPoint(1.0, {"ours": [figures(100), figures(104)], evil: [figures(50), figures(52)]}),
        SweepPoint(
            2.0,
            {"ours": [figures(180), figures(184)], evil: [figures(0.0, float("nan"), **FAILED)]},
        ),
        SweepPoint(4.0, {"ours": [figures(181, 5000), figures(183, 7000)]}),
    ]
    load = LoadSweep("concurrency", points=points)
    told = [SweepPoint(at, {"ours": [figures(90 * at)]}) for at in (1.0, 2.0, 4.0)]
    servers = [
        SweptServer("ours", "http://127.0.0.1:1", "m", started="--policy static"),
        SweptServer(evil, "http://127.0.0.1:2", "<i>m</i>", failed="HTTP 500: <b>no</b>"),
    ]
    about = {
        "machine": "a <machine>",
        "load": "words & more",
        "date": "2026-11-23",
        "again": "pageturner",
    }
    given: dict[str, Any] = {
        "targets": {"ttft": 500.0},
        "notes": ["x < y"],
        "forecast": "from <here>",
    }
    found = SweepResults(servers, [load], about, 2, **given | more)
    found.forecasts[0, "ours"] = told
    return found
