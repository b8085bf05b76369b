"""What is reckoned beside a measurement: the same each time, and from costs that noise leaves alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.compare import comparison, run_timeline, simulated_comparison
from pageturner.lab.compare.comparison import Contender
from pageturner.lab.compare.simulated_comparison import Circumstances
from pageturner.lab.simulation import calibration
from pageturner.lab.simulation.calibration import KeptCosts
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.step_cost import CalibratedCost, work_of_step
from pageturner.lab.traffic.traffic_generators import MIXES
from pageturner.request import Request

EACH = [Contender("prefill_first"), Contender("chunked")]


def cost_of(step: float = 0.004, row: float = 0.0004) -> CalibratedCost:
    config = EngineConfig(model="no-such-model", max_num_batched_tokens=128, max_num_seqs=8)
    about = {
        "config": msgspec.to_builtins(config),
        "blocks": 1024,
        "window": 0,
        "recent": 0,
        "max_model_len": 2048,
    }
    return CalibratedCost([step, 0, row, 0, 0, 0, 0], (0, 0), 1, 0.0, about)


def bench_of(cost: CalibratedCost) -> EngineBench:
    return comparison.simulated_engine(cost, lambda known: known)[0]


def mixed(bench: EngineBench) -> list[Request]:
    context = bench.built.max_model_len
    return comparison.make_requests(
        MIXES["mixed"].make(10, 1), 64, context, comparison.words_as_tokens
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    bench = bench_of(cost_of())
    found = comparison.run_contenders(
        bench, EACH[1:], mixed(bench), 1, tmp_path_factory.mktemp("logs"), progress=False
    )
    return found[EACH[1]][0]


def longest_gap(run: RecordedRun) -> float:
    told = run_timeline.figures(run, run_timeline.timeline_of(run), LatencyTargets())
    return float(told["itl_ms"]["max"])


@pytest.mark.slow
def test_what_is_reckoned_is_the_same_again() -> None:
    told = []
    for _ in range(2):
        cost = cost_of()
        bench = bench_of(cost)
        found = simulated_comparison.reckon(bench, EACH, mixed(bench), cost, "x")
        told.append(
            [
                run_timeline.figures(run, run_timeline.timeline_of(run), LatencyTargets())
                for runs in (found.same, found.stalled)
                for run in runs.values()
            ]
        )
    for one, again in zip(*told, strict=True):
        assert one["steps"] == again["steps"]
        assert one["output_tokens_per_s"] == pytest.approx(again["output_tokens_per_s"], rel=1e-9)


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_long_prompts_show_what_the_default_is_for(speed: float) -> None:
    """On a slow machine as on a fast one."""
    cost = cost_of(0.004 / speed, 0.0004 / speed)
    found = simulated_comparison.reckon(bench_of(cost), EACH, [], cost, "x")
    other, mine = (longest_gap(found.stalled[one]) for one in EACH)
    assert mine < other / 3
    assert found.same == {}


def test_a_context_too_short_for_long_prompts_has_none() -> None:
    assert simulated_comparison.stall_requests(cost_of(), 100) == []
    found = simulated_comparison.stall_requests(cost_of(), 512)
    assert all(len(r.prompt) + (r.params.max_tokens or 0) < 512 for r in found)


# -- what steps cost -----------------------------------------------------------------------------------------


def test_costs_of_a_busy_machine_add_up_to_the_seconds_of_processors(run: RecordedRun) -> None:
    """Half of the time went to others: a step takes twice as long, and computes no more."""
    bench = bench_of(cost_of())
    took = sum(step.end - step.start for step in run.steps if step.items)
    threads = bench.config.threads or len(os.sched_getaffinity(0))
    quiet = simulated_comparison.costs_of(
        bench, [run], Circumstances(0.0, 0.5 * threads * took, "today")
    )
    busy = simulated_comparison.costs_of(
        bench, [run], Circumstances(0.5, 0.5 * threads * took, "today")
    )
    assert quiet is not None
    assert busy is not None
    steps = [work_of_step(step) for step in run.steps if step.items]
    assert sum(map(quiet[0].cost.seconds, steps)) == pytest.approx(took, rel=0.05)
    assert sum(map(busy[0].cost.seconds, steps)) == pytest.approx(0.5 * took, rel=0.05)
    assert busy[1] == "measured today, while others took 50% of the machine"


def test_too_few_steps_tell_no_costs(run: RecordedRun) -> None:
    short = RecordedRun(run.header, run.records[:12])
    assert (
        simulated_comparison.costs_of(
            bench_of(cost_of()), [short], Circumstances(0.0, 1.0, "today")
        )
        is None
    )


def test_costs_are_kept_until_a_quieter_machine_tells_better_ones(tmp_path: Path) -> None:
    path = tmp_path / "steps" / "model.json"
    assert calibration.kept_costs(path) is None
    first, noisier = (
        KeptCosts(cost_of(row=row), others, "today", (90.0, None))
        for row, others in ((0.1, 0.4), (0.2, 0.8))
    )
    assert calibration.keep(path, first) == first
    assert calibration.keep(path, noisier) == first
    assert calibration.keep(path, KeptCosts(cost_of(row=0.3), 0.35, "later")) == first, (
        "hardly quieter"
    )
    quiet = KeptCosts(cost_of(row=0.4), 0.02, "at night")
    assert calibration.keep(path, quiet) == quiet
    assert calibration.keep(path, first) == calibration.kept_costs(path) == quiet
    assert [one.name for one in path.parent.iterdir()] == ["model.json"]


@pytest.mark.parametrize("text", ["", "{", '{"cost": 1}', "[]"])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    mine = KeptCosts(cost_of(), 0.0, "today")
    assert calibration.kept_costs(path) is None
    assert calibration.keep(path, mine) == calibration.kept_costs(path) == mine


def test_a_place_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine = KeptCosts(cost_of(), 0.0, "today")
    assert calibration.keep(tmp_path / "file" / "model.json", mine) == mine


def test_costs_are_kept_by_model_kernels_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    bench = bench_of(cost_of())
    names = {
        calibration.costs_file(
            replace(bench.built, fingerprint=fingerprint), replace(bench.config, threads=threads)
        )
        for fingerprint in ("a", "b")
        for threads in (1, 2)
    }
    assert len(names) == 4
    assert {name.parent for name in names} == {tmp_path / "steps"}
