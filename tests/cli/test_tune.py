"""`pageturner tune` as people type it: what it prints and writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageturner import cli
from pageturner.config import settings as config
from pageturner.lab.simulation.step_cost import CalibratedCost

ENGINE = {
    "config": {
        "model": "some.gguf",
        "backend": "fake",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    },
    "blocks": 400,
    "window": 0,
    "recent": 0,
    "max_model_len": 512,
    "model": "",
    "fingerprint": "fake",
}
TRAFFIC = (
    "--rate",
    "40",
    "--num-prompts",
    "30",
    "--input-len",
    "40",
    "--output-len",
    "8",
    "--cap",
    "16",
)
TARGETS = ("--ttft-ms", "400", "--tpot-ms", "30")


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 0], (0, 0), 100, 0.0, ENGINE).save(path)
    return str(path)


@pytest.mark.slow
def test_the_file_it_writes_is_what_it_found(
    calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, output = tmp_path / "tuned.toml", tmp_path / "out.json"
    words = (
        "tune",
        "--calibration",
        calibration,
        *TRAFFIC,
        *TARGETS,
        "--budget",
        "3",
        "--finalists",
        "1",
    )
    words += ("--policies", "chunked,orca", "--orders", "fcfs")
    assert cli.main([*words, "--write", str(written), "--output", str(output)]) == 0
    text, found = capsys.readouterr().out, json.loads(output.read_bytes())
    assert "the same, measured on the engine:" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert "(as given)" in text
    assert "at least" in text
    assert f"serve --config {written}" in text
    engine = config.load(str(written)).engine
    assert {name: getattr(engine, name) for name in found["best"]} == found["best"]
    assert engine.tpot_ms == 30.0, "what was simulated and measured is what is served"
    assert (engine.model, engine.backend) == ("some.gguf", "fake"), "the engine that was calibrated"
    assert sum(bool(one["measured"]) for one in found["trials"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TRAFFIC, "which targets?"),
        ((*TRAFFIC, "--ttft-ms", "-1"), "--ttft-ms is more than 0"),
        ((*TRAFFIC, *TARGETS, "--policies", "x"), "unknown policy 'x'"),
        ((*TRAFFIC, *TARGETS, "--orders", "x"), "unknown order 'x'"),
        ((*TRAFFIC, *TARGETS, "--budget", "0"), "--budget is more than 0"),
        ((*TRAFFIC, *TARGETS, "--rate-scale", "1,2"), "one number"),
        ((*TRAFFIC, *TARGETS, "--search"), "belong to pageturner simulate"),
        (
            (*TRAFFIC, "--ttft-ms", "0.001", "--finalists", "0", "--budget", "0.2"),
            "no setting that was tried",
        ),
        (TARGETS, "which traffic"),
    ],
)
def test_what_it_refuses(
    calibration: str,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "tuned.toml"
    assert cli.main(["tune", "--calibration", calibration, *words, "--write", str(written)]) in (
        1,
        2,
    )
    assert message in capsys.readouterr().err
    assert not written.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_tokens": 5}', "trace.jsonl:2"),
        ('{"prompt_tokens": -5, "output_tokens": 3, "arrival_s": 3}', "lengths are 1 or more"),
        ('{"prompt_tokens": 5, "output_tokens": 3, "arrival_s": -3}', "0 or later"),
        ('{"prompt_tokens": 5, "output_tokens": 3, "arrival_s": 0.5}', "sort the trace"),
    ],
)
def test_a_broken_trace_is_named(
    calibration: str, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 5, "output_tokens": 3, "arrival_s": 1}\n' + line)
    assert cli.main(["tune", "--calibration", calibration, "--trace", str(trace), *TARGETS]) != 0
    assert message in capsys.readouterr().err
