"""Installing says what it does: the build backend and the installer of the Makefile."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).parents[2]
BUILD = """
import subprocess, sys, time
from types import SimpleNamespace
import pageturner_build as backend
backend.EVERY_S = 0.05
def build(*given):
    subprocess.run(["sh", "-c", "echo '[3/15] Building CXX object CMakeFiles/pt_avx2.dir/a/gemm.cpp.o'"], check=True)
    time.sleep(0.3)
    return "pageturner-1-py3-none-any.whl" if given[0] == "numpy" else "pageturner-1-cp311-x.whl"
backend._scikit = SimpleNamespace(build_wheel=build)
print("made", backend.build_wheel(sys.argv[1]))
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], stderr=subprocess.DEVNULL)"


@pytest.mark.parametrize(
    ("kind", "last"), [("native", "compiled in 0 s"), ("numpy", "hundreds of times slower")]
)
def test_a_build_says_how_far_it_is_to_who_called_it(kind: str, last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, BUILD, kind],
        env={**os.environ, "PYTHONPATH": str(ROOT / "setup")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pageturner: compiling the kernels: 3 of 15, gemm (0 s)\n" in done.stderr
    assert done.stderr.endswith(f"{last}\n")
    assert done.stdout.startswith("[3/15]"), "and pip has what it had"
    assert "made pageturner-1" in done.stdout


def test_a_plain_file_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for mode, lines in (("w", 0), ("a", 1)):
        with log.open(mode) as file:
            subprocess.run(
                [sys.executable, "-c", PARENT, BUILD, "native"],
                env={**os.environ, "PYTHONPATH": str(ROOT / "setup")},
                stdout=subprocess.DEVNULL,
                stderr=file,
                check=True,
            )
        assert bool(log.read_text()) == bool(lines), "its owner would write over what is added"


def installer() -> Any:
    spec = importlib.util.spec_from_file_location("install", ROOT / "setup" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    return install


def test_a_step_is_told_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    install = installer()
    install.EVERY_S = 0.05
    program = (
        "import time; print('Collecting numpy==2', flush=True); time.sleep(0.5);"
        "print('pageturner: compiling the kernels: 3 of 15 (9 s)', flush=True); time.sleep(0.5)"
    )
    install.run(install.Step("packages", [sys.executable, "-c", program], 26))
    said = capsys.readouterr().out
    assert "packages: 1 of 26, numpy (0 s)\n" in said
    assert "packages: compiling the kernels: 3 of 15 (" in said
    assert "\npackages: done in" in said
    with pytest.raises(SystemExit):
        install.run(install.Step("kernels", [sys.executable, "-c", "import nothing_of_the_kind"]))
    assert "No module named 'nothing_of_the_kind'" in capsys.readouterr().out


@pytest.mark.parametrize(("pip", "lent"), [("22.2.9", False), ("22.3", True), ("24.0.dev1", True)])
def test_an_environment_is_made_without_pip_where_ours_can_work_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pip: str, lent: bool
) -> None:
    install = installer()
    (tmp_path / "_bundled").mkdir()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(install, "version", lambda name: pip)
    monkeypatch.setattr(install, "find_spec", lambda name: spec)
    assert install.bundled_pip() is None, "there is no wheel"
    (tmp_path / "_bundled" / "pip-23.2-py3-none-any.whl").touch()
    assert install.bundled_pip() == (tmp_path / "_bundled" if lent else None)
