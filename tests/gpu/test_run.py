"""bench/gpu/run.py comes to its end on the interpreted device, no bit differs there, its judge can fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu"


def module(name: str) -> ModuleType:
    """A file of bench/gpu that needs no device."""
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


sys.path.insert(0, str(GPU))  # run.py imports its neighbours by name
JUDGE, WATCH = module("run_judge"), module("run_watch")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_cheap_parts_run_to_their_end_on_the_interpreted_device(tmp_path: Path) -> None:
    pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton
    out = tmp_path / "told.jsonl"
    command = [
        sys.executable,
        GPU / "run.py",
        "ceilings",
        "bits",
        "kinds",
        "forms",
        "--tiny",
        "--limit",
        "3000",
        "--out",
        out,
    ]
    subprocess.run(command, capture_output=True)
    told = JUDGE.read(out)
    assert {one["name"]: one.get("why", "") for one in told if one["part"] == "part"} == {
        "ceilings": "",
        "bits": "",
        "kinds": "",
        "forms": "",
    }
    formed = [one for one in told if one["part"] == "forms" and one["what"] == "right"]
    assert len(formed) == 11
    assert not any(
        one["wrong"] or one["other_bits"] or one["embedded"] or one["gated"] for one in formed
    )
    assert [one["differ"] for one in told if one["part"] == "bits"] == [0] * 5
    kept = {
        one["kind"]: one["error"]
        for one in told
        if one["part"] == "kinds" and one.get("what") == "kv"
    }
    assert kept["float16"] < kept["fp8_e4m3"] < 0.1


@pytest.mark.soak  # several minutes of a processor: part of make test-gpu
@pytest.mark.timeout(3600)
def test_every_part_runs_to_its_end_on_the_interpreted_device(tmp_path: Path) -> None:
    pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton
    out = tmp_path / "told.jsonl"
    done = subprocess.run(
        [sys.executable, GPU / "run.py", "--tiny", "--limit", "3000", "--out", out],
        capture_output=True,
        text=True,
    )
    told = JUDGE.read(out)
    parts = {one["name"]: one.get("why", "") for one in told if one["part"] == "part"}
    assert set(parts) == set(module("run").PARTS)
    assert set(parts.values()) == {""}, parts
    bits = [one for one in told if one["part"] == "bits"]
    assert {one["what"] for one in bits} == {"products", "steps", "adapters", "answers"}
    assert all(one["compared"] > 0 and one["differ"] == 0 for one in bits)
    assert all(one["passed"] for one in told if one["part"] in ("right", "proof"))
    for part in ("decode", "prefill", "nano", "burst", "kinds", "product"):
        beside = [one for one in told if one["part"] == part]
        assert all(one["floor_copy_ms"] > 0 < one["floor_matrix_ms"] for one in beside)
        assert beside
    assert "bits of answers: 0 differ" in done.stdout  # the table comes last


def verdict_of(told: list[dict[str, Any]], begins: str) -> Any:
    return next(one for one in JUDGE.judge(told) if one.what.startswith(begins))


@pytest.mark.parametrize(
    ("line", "begins", "good", "bad"),
    json.loads(Path(__file__).with_name("targets.json").read_text()),
)
def test_a_figure_passes_at_its_target_and_fails_behind_it(
    line: dict[str, Any], begins: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    assert verdict_of([line | good], begins).passed is True
    assert verdict_of([line | bad], begins).passed is False
    without = verdict_of([], begins)
    assert (without.run, without.passed) == (False, None)


def test_a_step_costs_what_its_products_and_attention_cost_more_than_the_best_choice() -> None:
    size = {"batch": 64, "context": 1024}
    floors = {"share_of_copy": 0.8, "floor_copy_ms": 0.8, "floor_matrix_ms": 0.1}
    step = {
        "part": "decode",
        "device": "H100",
        "layers": 10,
        "ms": 1.0,
        "tok_s": 64_000.0,
        **size,
        **floors,
    }
    part = {"part": "invariance", "cost": 0.1}
    products = part | {"what": "products", "rows": 64, "us": 50.0, "best_us": 47.0}
    parts = [products, part | size | {"what": "attention", "rows": 1, "us": 20.0, "best_us": 18.0}]
    line = "the cost of invariance end to end: at most 5%: 64 x 1024"
    assert verdict_of([step, *parts], line).figure == "5.3% of 1.00 ms"  # 50 of 950 us
    assert verdict_of([step, *parts], line).passed is False
    assert verdict_of([step | {"layers": 9}, *parts], line).passed is True
    assert verdict_of([step], line).run is False


def test_a_peer_is_beaten_by_the_better_of_our_runs() -> None:
    ours = [{"part": "nano", "tok_s": pace, "complete": True} for pace in (90.0, 110.0)]
    theirs = {"part": "torch", "load": "nano", "tok_s": 100.0}
    found = verdict_of([*ours, theirs], "beside a plain PyTorch engine, nano")
    assert (found.passed, found.figure) == (True, "1.10x (100 tok/s theirs)")
    assert verdict_of([ours[0], theirs], "beside a plain PyTorch engine, nano").passed is False


def test_a_part_that_ends_early_fails_and_tells_why(tmp_path: Path) -> None:
    out = tmp_path / "told.jsonl"
    broken = {"part": "part", "name": "bits", "done": False, "why": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    out.write_text("a warning\n" + json.dumps(broken) + "\n")
    found = JUDGE.judge(JUDGE.read(out))[-1]
    assert (found.passed, "ILLEGAL_ADDRESS" in found.figure) == (False, True)
    assert "FAIL     part bits" in JUDGE.table([broken])


class Clock:
    """A device's clock that says what it is told to."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def mark(self) -> float:
        return self.times.pop(0)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def watched(times: list[float]) -> Any:
    names = (
        "launch",
        "replay",
        "download",
        "synchronise",
        "begin_recording",
        "end_recording",
        "free",
    )
    inner = SimpleNamespace(**dict.fromkeys(names, lambda *_: None), alloc=lambda nbytes: nbytes)
    return WATCH.Watched(inner, Clock(times))


def test_the_watch_tells_gaps_from_work_and_leaves_recordings_alone() -> None:
    driver = watched([0.0, 1.0, 1.000003, 2.0, 2.5, 3.0])
    driver.watch()
    driver.launch()
    driver.begin_recording()
    driver.launch()
    driver.end_recording()
    driver.replay()
    driver.download()
    driver.synchronise()
    told = driver.unwatch()
    assert told["busy_s"] == pytest.approx(2.499997)
    assert told["idle_s"] == pytest.approx(0.500003)
    assert (told["gaps"]["<5us"], told["gaps"][">=1000us"], told["pieces"]) == (1, 1, 3)
    driver.launch()  # nobody watches: no mark is taken
    assert driver.calls == 4


def test_the_watch_gives_back_what_was_taken_through_it() -> None:
    driver, given = watched([]), []
    driver.inner.free = driver.inner.forget = given.append
    for nbytes in (256, 512, 1024):
        driver.alloc(nbytes)
    driver.free(512)
    driver.inner.end_recording = ["a", "b"].pop
    for _ in range(2):
        driver.begin_recording()
        driver.end_recording()
    driver.forget("b")
    driver.release()
    driver.release()
    assert given == [512, "b", "a", 256, 1024]


def test_of_a_part_that_was_run_twice_the_last_run_counts() -> None:
    def run(differ: int, **end: Any) -> list[dict[str, Any]]:
        figures = {"part": "bits", "what": "products", "compared": 9, "differ": differ}
        return [figures, {"part": "part", "name": "bits", **end}]

    cut, good, bad = run(0, done=False, why="not done"), run(0, done=True), run(1, done=True)
    skipped = [{"part": "part", "name": "bits", "done": False, "why": "no time was left"}]
    assert verdict_of(cut + good, "bits of prod").passed
    assert not any(one.passed is False for one in JUDGE.judge(cut + good + skipped))
    assert verdict_of(good + bad, "bits of prod").passed is False
    assert verdict_of(good + cut, "part bits").passed is False
