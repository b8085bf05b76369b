"""Turns of several engines on the same workloads, and the ratios that are taken within a round."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "accept")]


from peers import rounds, run  # noqa: E402
from peers.rounds import Turn  # noqa: E402


def turn(
    number: int, workload: str, engine: str, rate: float, latency: float = 100.0
) -> dict[str, Any]:
    spread = {"p50": latency, "p99": 2 * latency}
    figures = {"output_tokens_per_s": rate, "ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread}
    return {"round": number, "workload": workload, "engine": engine, "figures": figures}


def test_everybody_runs_once_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def opened(engine: str) -> Iterator[run.Measure]:
        log.append(f"open {engine}")

        def measure(path: Path, flags: list[str]) -> dict[str, Any]:
            if engine == "openvino":
                raise RuntimeError("it fell over")
            log.append(f"{engine} {path.stem} {' '.join(flags)}".strip())
            return {"output_tokens_per_s": 1.0}

        yield measure
        log.append(f"close {engine}")

    monkeypatch.setattr(rounds, "opened", opened)
    paths = {"a": Path("a.jsonl"), "b": Path("b.jsonl")}
    engines = ("ours", "vllm", "openvino", "llama")
    failed: dict[str, str] = {}
    turns = list(rounds.play(engines, paths, 2, {"b": ["--limit", "3"]}, {"llama": 1}, failed))
    assert failed == {"openvino": "it fell over"}
    each = ["open ours", "ours a", "close ours", "open ours", "ours b --limit 3", "close ours"]
    vllm = ["vllm a", "vllm b --limit 3"]
    assert [x for x in log if x.endswith("ours") or x.startswith("ours")] == each * 2
    assert [x for x in log if "vllm" in x] == ["open vllm", *vllm, *vllm, "close vllm"]
    assert log.count("open openvino") == 1, "who fails is asked no more"
    assert log.count("llama a") == 1
    assert [(t.round, t.engine) for t in turns if t.workload == "a"] == [
        (0, "ours"),
        (0, "vllm"),
        (0, "llama"),
        (1, "ours"),
        (1, "vllm"),
    ]


def test_ratios_are_taken_within_a_round() -> None:
    rates = {"ours": (100, 50, 90), "llama": (50, 10, 90)}
    turns = [Turn(**turn(n, "w", e, rates[e][n], rates[e][n])) for e in rates for n in range(3)]
    assert rounds.ratio(turns, "w", "output", "ours", "llama") == (2.0, 3)
    assert rounds.ratio(turns, "w", "TPOT p50", "ours", "llama") == (0.5, 3)
    assert rounds.best_peer(turns, "w", "output") == "llama"
    assert rounds.ranked(turns, "w", "TTFT p50") == ["llama", "ours"]
    with pytest.raises(LookupError, match="no peer"):
        rounds.best_peer([t for t in turns if t.engine == "ours"], "w", "output")
