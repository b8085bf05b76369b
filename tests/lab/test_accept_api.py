"""Parts of acceptance scripts, and api.py's part of clients: what a script says becomes a line that can fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "clients"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # goes first: both have a house.py

import api_clients
import harness
import install

ROOT = Path(__file__).parents[2]

SCRIPT = """
from seen import Seen, expect
seen = Seen("some", "pytest")
@seen.check
def right(): expect(1, "one")
@seen.check
def wrong(): expect(0, "nought is nothing")
@seen.check
def empty(): pass
@seen.check
async def breaks(): raise ValueError("it broke")
seen.tell()
"""


def test_a_check_passes_only_if_it_expected_something_that_held() -> None:
    folder = str(ROOT / "bench" / "clients")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["checks"] == {
        "right": True,
        "wrong": "Unexpected: nought is nothing",
        "empty": "expected nothing",
        "breaks": "ValueError: it broke",
    }


def said(**checks: bool | str) -> str:
    seen = {"client": "some", "version": "1.2", "checks": checks, "figure": "3 tokens"}
    return f"talk\n{json.dumps(seen)}\nand more\n"


@pytest.mark.parametrize(
    ("output", "passed", "figure"),
    [
        (said(a=True, b=True), True, "2 of 2 checks (a, b); 3 tokens; 5 s"),
        (said(a=True, b="no call"), False, "1 of 2 checks (a); 3 tokens; 5 s; b: no call"),
        (said(), False, "0 of 0 checks"),
        ("nothing", False, "its script ended with status 3 and no figures: Traceback"),
    ],
)
def test_what_a_script_says_is_a_line(output: str, passed: bool, figure: str) -> None:
    line = api_clients.line("some", 3, output, "Traceback", 5.0)
    assert line.verdict == ("PASS" if passed else "FAIL")
    assert line.figure.startswith(figure)


def test_what_cannot_be_installed_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETURNER_CLIENTS", str(tmp_path))
    monkeypatch.setitem(
        install.ENVIRONMENTS, "none", install.Environment("none.py", ("no-such-client",))
    )
    wanted = argparse.Namespace(clients=["none"], no_install=True, task_seconds=1.0)
    line = next(iter(api_clients.lines(wanted)))
    assert (line.verdict, line.what, line.figure) == ("NOT RUN", "none", "not installed")


def test_every_client_has_its_script_and_a_version() -> None:
    for name, environment in install.ENVIRONMENTS.items():
        assert (ROOT / "bench" / "clients" / environment.script).is_file(), name
        pinned = [
            word
            for word in (*environment.packages, *environment.without)
            if "==" in word or "@" in word[1:]
        ]
        assert pinned, f"{name}: no version"


def test_an_option_goes_to_the_parts_that_know_it_and_a_broken_part_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_rounds(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=5)

    def rounds(options: argparse.Namespace) -> Iterator[harness.Line]:
        yield harness.Line("rounds", f"{options.rounds}", True)

    def absent(options: argparse.Namespace) -> Iterator[harness.Line]:
        raise harness.NotRun("nobody is at home")

    def broken(options: argparse.Namespace) -> Iterator[harness.Line]:
        yield harness.Line("half", "1", True)
        raise ValueError("seven")

    parts = {
        "some": harness.Part(rounds, add_rounds),
        "absent": harness.Part(absent),
        "broken": harness.Part(broken),
    }
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "--only", "some", "absent", "--rounds", "2"])
    assert harness.main("x", None, parts) == 0
    out = capsys.readouterr().out
    assert "PASS      rounds: 2" in out
    assert "NOT RUN   absent: nobody is at home" in out
    monkeypatch.setattr(sys, "argv", ["x"])
    assert harness.main("x", None, parts) == 1
    out = capsys.readouterr().out
    assert "PASS      half: 1" in out
    assert "FAIL      broken: ValueError: seven" in out
    monkeypatch.setattr(sys, "argv", ["x", "--seed", "1"])
    with pytest.raises(SystemExit):
        harness.main("x", None, parts)


def test_every_part_of_a_script_is_there() -> None:
    for script in ("api", "page", "scale", "weights"):
        for name in __import__(script).PARTS:
            assert (ROOT / "bench" / "accept" / f"{script}_{name}.py").is_file(), (script, name)
