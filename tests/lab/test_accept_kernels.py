"""Acceptance of the kernels without measuring: turns, judgement of figures, trials, what is absent."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "accept")]

import kernels_judge as judge  # noqa: E402
from harness import NotRun  # noqa: E402

import kernels as accept  # noqa: E402
from peers import rounds, run  # noqa: E402
from peers.rounds import Turn  # noqa: E402


def turn(
    number: int, workload: str, engine: str, rate: float, latency: float = 100.0
) -> dict[str, Any]:
    spread = {"p50": latency, "p99": 2 * latency}
    figures = {"output_tokens_per_s": rate, "ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread}
    return {"round": number, "workload": workload, "engine": engine, "figures": figures}


def verdicts(part: str, found: dict[str, Any]) -> list[bool | None]:
    return [line.passed for line in judge.lines(part, found)]


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


def test_the_picture_is_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "FOLDER", tmp_path)
    for number, workload in enumerate(("mixed64", "poisson", "prefix", "single"), 2):
        turns = [
            Turn(**turn(0, workload, "vllm", 10.0, 80.0)),
            Turn(**turn(1, workload, "vllm", 1.0)),
        ]
        turns += [Turn(**turn(0, workload, "ours", 10.0 * number, 40.0))]
        rounds.save(tmp_path / f"{workload}.json", {}, turns)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--picture", str(tmp_path / "peers.svg")])
    assert accept.main() == 0
    drawn = (tmp_path / "peers.svg").read_text()
    assert re.findall(r"[0-9]+\.[0-9]{2}x", drawn) == [
        "2.00x",
        *["2.00x"] * 3,
        "4.00x",
        "5.00x",
        "2.00x",
    ]


@pytest.mark.parametrize(("rate", "passed"), [(231.0, True), (229.0, False)])
def test_mixed64_is_judged_by_the_fastest_peer(rate: float, passed: bool) -> None:
    turns = [
        turn(0, "mixed64", "ours", rate, 50),
        turn(0, "mixed64", "llama", 60),
        turn(0, "mixed64", "vllm", 100),
    ]
    turns.append(turn(0, "mixed64", "transformers", 15))
    assert verdicts("mixed64", {"turns": turns}) == [
        passed,
        rate / 15 >= 15,
        True,
        True,
        *[None] * 4,
    ]
    slow = [turn(0, "mixed64", "ours", 1000, 150), *turns[1:3]]
    assert verdicts("mixed64", {"turns": slow})[:4] == [True, False, False, False]


def test_who_was_not_measured_is_said() -> None:
    turns = [turn(0, "prefix", "ours", 300), turn(0, "prefix", "vllm", 100)]
    found = {"turns": turns, "failed": {"openvino@/m/x.Q4_0.gguf": "it fell over"}}
    last = list(judge.lines("prefix", found))[-1]
    assert (last.what, last.figure) == ("prefix: openvino Q4_0 was not measured", "it fell over")
    assert last.passed is None


def test_poisson_needs_a_third_and_a_half() -> None:
    def found(latency: float) -> dict[str, Any]:
        turns = [turn(0, "poisson", "ours", 1, latency), turn(0, "poisson", "vllm", 1, 300)]
        return {"turns": turns, "rate_scale": 2.0, "fastest": "vllm"}

    assert [v for v in verdicts("poisson", found(99)) if v is not None] == [True, True]
    assert [v for v in verdicts("poisson", found(101)) if v is not None] == [False, True]
    assert [v for v in verdicts("poisson", found(151)) if v is not None] == [False, False]


@pytest.mark.parametrize(
    ("latency", "expected"), [(4.0, [True, True]), (6.0, [True, False]), (9.0, [False, False])]
)
def test_single_is_judged_by_llama_and_by_bandwidth(latency: float, expected: list[bool]) -> None:
    turns = [turn(n, "single", "ours", 1, latency) for n in (0, 1)] + [
        turn(0, "single", "llama", 1, 12)
    ]
    found = {"turns": turns, "read_bytes": 100e6, "read_gb_s": 25.0}  # 4 ms
    assert verdicts("single", found)[:2] == expected


def step_of(total: float) -> dict[str, Any]:
    """A step in which choosing adds 4 us to the head."""
    served = {"mean_us": total, "calls_us": {"choose": 14.0}}
    return {"served": served, "apart": {"operators": {"head": {"us": 10.0}, "sample": {"us": 6.0}}}}


def ladder(us: float) -> dict[str, Any]:
    rows = []
    for name in judge.SHAPES:
        for kind in ("Q4_1", "Q4_1 x2"):
            wanted = (kind == "Q4_1 x2") == (name == "k,v")
            took = us if wanted else 1e9
            rows.append(
                {
                    "name": f"SmolLM2 {name} 1x1",
                    "kind": kind,
                    "rows": 512,
                    "us": took,
                    "gop_s": 1e6 * 10 / took,
                }
            )
    return {"rungs": rows, "limits": {"integer_gop_s": 1000.0}, "threads": 2}


def test_prefill_takes_the_best_type_and_the_products_as_served() -> None:
    one = {"ours": 190.0, "theirs": {"Q4_0": 100.0, "F32": 50.0}}
    found = {"rounds": [one] * 3, "ladder": ladder(1e4)}
    lines = list(judge.lines("prefill", found))
    assert [line.passed for line in lines] == [True, True]
    assert "1.90x Q4_0" in lines[0].figure
    assert "100%: 1000 of 1000 GOP/s" in lines[1].figure
    assert verdicts("prefill", {"rounds": [one | {"ours": 179.0}], "ladder": ladder(2e4)}) == [
        False,
        False,
    ]


def test_the_other_parts_can_pass_and_fail() -> None:
    def loads(workload: str, mine: str, rate: float, **more: Any) -> dict[str, Any]:
        return {"turns": [turn(0, workload, mine, rate), turn(0, workload, "vllm", 100)], **more}

    def qwen(rate: float) -> dict[str, Any]:
        mine, theirs = "ours@/m/q.Q4_K.gguf", "llama@/m/q.Q4_K.gguf"
        turns = [
            turn(0, w, e, r)
            for w in ("mixed64", "single")
            for e, r in ((mine, rate), (theirs, 100))
        ]
        return {"turns": turns}

    def types(rate: float) -> dict[str, Any]:
        turns = [turn(0, "mixed64", f"ours@/m/s.{kind}.gguf", rate) for kind in ("F32", "F16")]
        return {
            "turns": [
                *turns,
                turn(0, "mixed64", "llama@/m/s.F16.gguf", 100),
                turn(0, "mixed64", "vllm", 90),
            ]
        }

    def steps(total: float) -> dict[str, Any]:
        return {"runs": [step_of(total)]}

    decode = {"ours": 200.0, "theirs": {"Q4_0": 100.0}}
    memory = {"packed_bytes": 100e6, "kv_bytes": 50e6}
    for part, good, poor in (
        ("prefix", loads("prefix", "ours", 200), loads("prefix", "ours", 199)),
        ("floats", types(120), types(119)),
        ("qwen", qwen(180), qwen(119)),
        (
            "unseen",
            loads("mixed64", "ours", 230, sha256="ab"),
            loads("mixed64", "ours", 229, sha256="ab"),
        ),
        ("batch32", {"rounds": [decode]}, {"rounds": [decode | {"ours": 199.0}]}),
        ("sampler", steps(100.0), steps(99.0)),
        (
            "memory",
            memory | {"peak_mb": 300e6 / (1 << 20)},
            memory | {"peak_mb": 301e6 / (1 << 20)},
        ),
    ):
        assert False not in verdicts(part, good), part
        assert True in verdicts(part, good), part
        assert False in verdicts(part, poor), part


def test_every_part_is_measured_judged_and_titled() -> None:
    assert accept.PARTS.keys() == judge.TITLES.keys() == judge._JUDGES.keys()


def test_parts_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sampled(options: accept.Options) -> dict[str, Any]:
        return {"runs": [step_of(100.0)]}

    def absent(options: accept.Options) -> dict[str, Any]:
        raise NotRun("nobody is at home")

    def broken(options: accept.Options) -> dict[str, Any]:
        raise ValueError("seven")

    monkeypatch.setattr(accept, "FOLDER", tmp_path)
    for name, part in (("sampler", sampled), ("prefix", absent), ("batch32", broken)):
        monkeypatch.setitem(accept.PARTS, name, part)
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--only", name])
        assert accept.main() == (name == "batch32")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--report"])
    assert accept.main() == 1
    out = capsys.readouterr().out
    assert "PASS      sampler" in out
    assert "NOT RUN   prefix: at least 2x the best peer: nobody is at home" in out
    assert "FAIL      decode at batch 32" in out
    assert "ValueError: seven" in out
    titles = sum(len(t) for t in judge.TITLES.values())
    assert f"{titles} lines, 1 failed, {titles - 2} not run" in out
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--only", "sampler", "--limit", "2"])
    assert accept.main() == 0
    assert "TRIAL     sampler" in capsys.readouterr().out
    assert json.loads((tmp_path / "sampler.json").read_text())["trial"] is True
