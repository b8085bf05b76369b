"""`compare` as people type it: what it writes, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from pageturner import cli
from pageturner.config.settings import EngineConfig
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.compare import run_timeline
from pageturner.lab.simulation import calibration as kept_costs
from pageturner.lab.simulation import recorded_runs
from pageturner.lab.simulation.step_cost import CalibratedCost


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where costs of steps are kept meanwhile."""
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    """2 ms a step and 1 ms a row, of an engine that never was."""
    config = msgspec.to_builtins(EngineConfig(model="no-such-model"))
    engine = {"config": config, "blocks": 512, "window": 0, "recent": 0, "max_model_len": 1024}
    path = tmp_path / "calibration.json"
    CalibratedCost([0.002, 0, 0.001, 0, 0, 0, 0], (0, 0), 1, 0.0, engine).save(path)
    return str(path)


def compare(calibration: str, output: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["compare", "--simulate", calibration, "--output", str(output), *words]) == 0
    found: dict[str, Any] = json.loads(output.with_suffix(".json").read_bytes())
    return found


def test_page_figures_pictures_and_logs_are_written(
    calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, drawn = tmp_path / "logs", tmp_path / "drawn"
    words = (
        "--policies",
        "static,chunked",
        "--num-prompts",
        "20",
        "--static-batch",
        "4",
        "--cap",
        "128",
    )
    told = compare(
        calibration,
        tmp_path / "a" / "page.html",
        *words,
        "--logs",
        str(logs),
        "--pictures",
        str(drawn),
    )
    assert list(told["contenders"]) == ["static", "chunked"]
    for name, mine in told["contenders"].items():
        run = recorded_runs.last_run(logs / f"{name}-fcfs-1.steps")
        again = run_timeline.figures(run, run_timeline.timeline_of(run), LatencyTargets(2.0, 0.2))
        assert {key: mine[key] for key in again} == again
    ElementTree.fromstring((tmp_path / "a" / "page.html").read_text())
    assert sorted(path.stem for path in drawn.iterdir()) == ["batch", "figures", "gantt", "memory"]
    assert "not measured: fair" in (drawn / "figures.txt").read_text()
    text = capsys.readouterr().out
    assert "No model ran, so nothing is known of answers." in text
    assert "the same in all runs" not in text + (tmp_path / "a" / "page.html").read_text()
    assert told["same_answers"] is None
    assert "--static-batch 4" in told["about"]["command"]
    assert "--cap 128" in told["about"]["command"]


def test_tenants_have_a_picture_of_their_service(calibration: str, tmp_path: Path) -> None:
    words = (
        "--mix",
        "tenants",
        "--num-prompts",
        "38",
        "--policies",
        "chunked",
        "--orders",
        "fcfs,fair",
    )
    compare(
        calibration,
        tmp_path / "page.html",
        *words,
        "--cap",
        "128",
        "--pictures",
        str(tmp_path / "drawn"),
    )
    svg = (tmp_path / "drawn" / "service.svg").read_text()
    ElementTree.fromstring(svg)
    assert svg.count("<title>loud</title>") == 2


def test_a_trace_is_replayed_without_an_oracle(calibration: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"arrival_s": 5 + i, "prompt_tokens": 100, "output_tokens": 60 * (i + 1)} for i in range(3)
    ]
    rows.append({"arrival_s": 9.0, "prompt_tokens": 5000, "output_tokens": 5})
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--trace", str(trace), "--cap", "150", "--policies", "chunked", "--rate-scale", "2")
    told = compare(calibration, tmp_path / "page.html", *words)
    assert told["contenders"]["chunked"]["output_tokens"] == 60 + 120 + 150
    workload = told["about"]["workload"]
    assert "1 answers cut at 150 tokens" in workload
    assert "1 left out as longer than 1024 tokens" in workload


def test_a_workload_of_prompts_and_a_rate(calibration: str, tmp_path: Path) -> None:
    path = tmp_path / "w<b>&.jsonl"
    path.write_text(
        '{"prompt": "a b", "max_tokens": 5}\n{"prompt": "c", "max_tokens": 6, "tenant": "x"}\n'
    )
    words = (
        "--workload",
        str(path),
        "--policies",
        "chunked",
        "--orders",
        "fcfs,fair",
        "--rate",
        "4",
    )
    told = compare(calibration, tmp_path / "page.html", *words, "--rounds", "2")
    assert list(told["contenders"]) == ["chunked", "chunked + fair"]
    assert all(len(mine["rounds"]) == 2 for mine in told["contenders"].values())
    assert "w<b>&.jsonl" in told["about"]["workload"]
    assert "w&lt;b&gt;&amp;.jsonl" in (tmp_path / "page.html").read_text()


def test_a_real_model_is_measured(tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n' * 2)
    output = tmp_path / "page.html"
    words = [
        "--workload",
        str(path),
        "--policies",
        "static,chunked",
        "--static-batch",
        "2",
        "--cap",
        "8",
    ]
    assert cli.main(["compare", *tiny, *words, "--output", str(output)]) == 0
    told = json.loads(output.with_suffix(".json").read_bytes())
    assert told["about"]["real"]
    assert told["same_answers"] == 2


@pytest.mark.slow
def test_the_second_comparison_advises_as_the_first_did(
    tiny: list[str],
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs of steps are measured once; what they say of the choice is the same again."""
    monkeypatch.setattr(kept_costs, "QUIETER", 2.0)  # however busy the machine was the first time
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 12}\n' * 8)
    words = [
        "--workload",
        str(path),
        "--policies",
        "static,chunked",
        "--static-batch",
        "4",
        "--cap",
        "16",
    ]
    told = []
    for number in range(2):
        output = tmp_path / f"{number}.html"
        assert cli.main(["compare", *tiny, *words, "--rounds", "2", "--output", str(output)]) == 0
        told.append(json.loads(output.with_suffix(".json").read_bytes()))
        (kept,) = cache.glob("steps/tiny_llama-*.json")
        assert "reckoned" in output.read_text()
    first, second = (
        [(one["want"], one["choose"], one["figure"]) for one in t["advice"]] for t in told
    )
    assert first == second
    assert all(len(t["contenders"]["chunked"]["rounds"]) == 2 for t in told)
    assert "The answers to all requests were the same in all runs" in capsys.readouterr().out
    assert msgspec.json.decode(kept.read_bytes())["when"]
    assert re.search(r"prompt of [0-9]+ tokens: .*a", (tmp_path / "0.html").read_text())


ROW = {"arrival_s": 1.0, "prompt_tokens": 3, "output_tokens": 3}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "holds no request"),
        ([ROW, {**ROW, "arrival_s": None}], "request 2 has no arrival time"),
        ([{**ROW, "arrival_s": -1}], "request 1 arrives at -1"),
        ([ROW, {**ROW, "arrival_s": 0.5}], "request 2 arrives at 0.5 s"),
        ([{**ROW, "output_tokens": 0}], "lengths are 1 or more"),
        ([{**ROW, "prompt_tokens": 5000}], "no request of the trace fits 1024 tokens"),
        ([{**ROW, "session_id": "s"}], "holds sessions"),
    ],
)
def test_bad_traces_are_refused(
    calibration: str,
    tmp_path: Path,
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    said: str,
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["compare", "--simulate", calibration, "--trace", str(trace)]) in (1, 2)
    assert said in capsys.readouterr().err
    assert list(own_folder.iterdir()) == [], "a refused comparison writes nothing"


def test_what_make_compare_wrote_is_not_seen_by_tests(own_folder: Path) -> None:
    """`make compare` leaves compare.html in the repository, where `make test` runs afterwards."""
    assert Path.cwd() == own_folder
    assert not Path.cwd().is_relative_to(Path(__file__).parents[2])
    assert not Path("compare.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "chunked,slow"], "unknown policy 'slow': one of chunked"),
        (["--orders", "lifo"], "unknown order 'lifo': one of fcfs"),
        (["--policies", ","], "name at least one policy"),
        (["--mix", "salad"], "unknown --mix 'salad': one of mixed"),
        (["--cap", "0"], "--cap is more than 0"),
        (["--rate", "-1"], "--rate is 0 or more"),
        (["--rounds", "-1"], "--rounds is 0 or more"),
        (["--ttft-ms", "nan"], "--ttft-ms is more than 0"),
        (["--length-scale", "2"], "--length-scale goes with --trace"),
        (["--trace", "a", "--workload", "b"], "give --trace or --workload, not both"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
    ],
)
def test_bad_flags_are_refused(
    calibration: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["compare", "--simulate", calibration, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"prompt": "a"}', "{"])
def test_bad_workloads_are_refused(
    calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    assert cli.main(["compare", "--simulate", calibration, "--workload", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(
    calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    output = str(tmp_path / "file" / "page.html")
    words = [
        "--simulate",
        calibration,
        "--num-prompts",
        "2",
        "--policies",
        "chunked",
        "--output",
        output,
    ]
    assert cli.main(["compare", *words]) == 1
    assert "cannot write" in capsys.readouterr().err
