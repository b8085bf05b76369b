"""calibrate, simulate, tune and compare on a device, which is the interpreter here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageturner import cli
from pageturner.parallel.drivers import DRIVER
from support.engines import GOLDENS

pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TINY = str(GOLDENS / "tiny_llama.gguf")
SMALL = (
    "--device",
    "cuda",
    "--max-num-seqs",
    "3",
    "--max-num-batched-tokens",
    "16",
    "--max-model-len",
    "64",
)
PLAN = "pageturner: fake: weights"  # told by an engine that starts on the device


def test_the_workshop_runs_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DRIVER, "support.fake_gpu:FakeDriver")
    monkeypatch.chdir(tmp_path)
    few = ("--num-prompts", "9", "--input-len", "6", "--output-len", "8")
    assert cli.main(["calibrate", TINY, *SMALL, *few, "--output", "fit.json"]) == 0
    assert PLAN in capfd.readouterr().err
    traffic = ("--calibration", "fit.json", "--rate", "2", "--num-prompts", "4", "--input-len", "6")
    traffic += ("--output-len", "3", "--cap", "8")
    assert cli.main(["simulate", *traffic]) == 0
    capfd.readouterr()
    targets = ("--ttft-ms", "60000", "--tpot-ms", "60000", "--budget", "1", "--finalists", "1")
    targets += ("--policies", "chunked", "--orders", "fcfs", "--write", "tuned.toml")
    assert cli.main(["tune", *traffic, *targets]) == 0
    told = capfd.readouterr()
    assert PLAN in told.err, "finalists are measured where the calibration was"
    assert "measured on the engine" in told.out


def test_policies_are_compared_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a workload of its own: the prompts of the built-in mixes are longer than what is quick here."""
    monkeypatch.setenv(DRIVER, "support.fake_gpu:FakeDriver")
    monkeypatch.chdir(tmp_path)
    each = [
        {"prompt": text, "max_tokens": most} for text, most in (("ab", 3), ("cde", 4), ("f", 2))
    ]
    Path("few.jsonl").write_text("".join(json.dumps(one) + "\n" for one in each))
    asked = (
        "--workload",
        "few.jsonl",
        "--policies",
        "static,chunked",
        "--rounds",
        "1",
        "--cap",
        "8",
    )
    assert cli.main(["compare", TINY, *SMALL, *asked]) == 0
    told = capfd.readouterr()
    assert PLAN in told.err
    assert "chunked" in told.out
    figures = json.loads(Path("compare.json").read_text())
    assert "static" in json.dumps(figures)
    assert Path("compare.html").stat().st_size > 1000
