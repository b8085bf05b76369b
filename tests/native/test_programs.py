"""The test program of the kernels passes on this machine, and the guards of `make soak` notice what they
are there for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from native import run

compiles = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("cmake")), reason="no compiler"
)


@pytest.mark.slow
@compiles
@pytest.mark.timeout(900)
def test_every_instruction_set_of_this_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.native(), capsys.readouterr().out
    program = run.build("native") / "kernels_test"
    listed = subprocess.run([program, "--list"], check=True, capture_output=True, text=True)
    assert listed.stdout.split()[-1] == "portable"
    refused = subprocess.run([program, "mmx"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "mmx is not available" in refused.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64", "qemu-x86_64"))),
    reason="no cross compiler or no emulator (g++-aarch64-linux-gnu, qemu-user)",
)
@pytest.mark.timeout(1800)
def test_arm_under_an_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.emulated(), capsys.readouterr().out


def test_a_failed_check_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "kernels_test"
    for verdict, status in (("ok", 0), ("FAILED", 1)):
        program.write_text(
            f"#!/bin/sh\necho 'avx2 norm n=1 1e-07 (1e-06) {verdict}'\nexit {status}\n"
        )
        program.chmod(0o755)
        assert run.check("here", [program]) is (status == 0)
    assert "norm n=1 1e-07 (1e-06) FAILED" in capsys.readouterr().out


def test_counts_may_differ_by_three_percent() -> None:
    recorded = {"avx2": {"row_q4": 1000, "row_q8": 1000}}
    assert run.compare({"avx2": {"row_q4": 1030, "row_q8": 970}}, recorded) == []
    lines = run.compare({"avx2": {"row_q4": 1031, "row_q8": 969}, "neon": {"row_q4": 1}}, recorded)
    assert [line.split(":")[0] for line in lines] == ["avx2 row_q4", "avx2 row_q8", "neon row_q4"]


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(run.Missing, match="apt-get install g\\+\\+-aarch64-linux-gnu qemu-user"):
        run.need("aarch64-linux-gnu-g++", "qemu-aarch64", "qemu-x86_64")
