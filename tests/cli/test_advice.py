"""What tools say at their end: the verdict of calibrate, the exit code of replay, a bar that ends full."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageturner import cli
from pageturner.lab.commands import calibrate
from pageturner.lab.simulation.calibration import Check
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.progress import Progress


def cost(median: float) -> CalibratedCost:
    return CalibratedCost([1.0] * 7, (median, 2 * median), 100, 0.0, {})


def check(error: float) -> Check:
    return Check("a load", {}, {"throughput": -error, "TTFT p50": error, "TPOT p50": 9.0}, 1.0, {})


@pytest.mark.parametrize(
    ("error", "busy", "said"),
    [
        (
            0.04,
            False,
            "the cost model fits (median error 4.0% of a step): good enough for planning",
        ),
        (
            0.2,
            False,
            "fits roughly (median error 20.0% of a step): good for comparing settings; keep 20%",
        ),
        (0.6, False, "does not fit (median error 60.0% of a step): do not plan with it"),
        (0.6, True, "stop what else runs on this machine, then calibrate again"),
        (0.6, False, "calibrate again with more requests (--num-prompts 180)"),
    ],
)
def test_a_calibration_ends_with_a_verdict(error: float, busy: bool, said: str) -> None:
    assert said in calibrate.verdict(cost(error), [], busy)
    assert ("stop what else runs" in calibrate.verdict(cost(0.6), [], busy)) == busy


def test_loads_that_the_fit_had_not_seen_decide_where_there_are_any() -> None:
    said = calibrate.verdict(cost(0.6), [check(0.05), check(0.07)], False)
    assert "fits (median error 7.0% of predicted throughput, TTFT and TPOT)" in said
    assert "does not fit" in calibrate.verdict(cost(0.01), [check(0.5)], False)


@pytest.mark.parametrize("tokens", [True, False])
def test_a_replay_that_is_the_same_is_0(
    tokens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.lab.test_history import record

    log = tmp_path / "steps"
    record(log, 1, step_log_tokens=tokens, max_num_batched_tokens=64)
    assert cli.main(["replay", str(log)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "the replay is the same as the log"
    assert ("answers: not compared, as the log holds no tokens" in said[1]) == (not tokens)


def test_a_replay_that_differs_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.lab.test_history import record

    log = tmp_path / "steps"
    record(log, 1, step_log_tokens=True, max_num_batched_tokens=64)
    found = type("Found", (), {"compared": 3, "tokens": 9, "differences": ["step 3: other"]})()
    monkeypatch.setattr("pageturner.lab.simulation.log_replay.replay_plans", lambda run: found)
    assert cli.main(["replay", str(log), "--plans"]) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT: step 3: other" in said
    assert said.endswith("the replay differs from the log\n")


def test_a_bar_ends_full_where_the_work_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("tuning", 60, enabled=True) as line:
        line.update(12, "40 tried")
    last = capsys.readouterr().err.rsplit("\r", 1)[1]
    assert last.startswith(f"tuning [{'#' * 30}] 12/12 ")
    assert last.rstrip().endswith("40 tried")


def test_a_bar_of_work_that_failed_stays_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress("tuning", 60, enabled=True) as line:
            line.update(12)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert "12/60" in capsys.readouterr().err.rsplit("\r", 1)[1]
    with Progress("nothing", 0, enabled=True):
        pass
    assert capsys.readouterr().err == "\n"
