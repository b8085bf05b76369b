"""bench/accept/parts.py, and api.py's part of clients: what a script says becomes a line that can fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "clients"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # goes first: both have a house.py

import api_clients
import install
import parts

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


def test_an_option_goes_to_the_parts_that_know_it_and_absent_parts_are_not_run() -> None:
    part = ModuleType("api_some")
    vars(part)["add_arguments"] = lambda parser: parser.add_argument(
        "--rounds", type=int, default=5
    )
    given = ["--rounds", "2", "--seed", "1"]
    arguments, left = parts.options(part, given)
    assert (arguments.rounds, left) == (2, ["--seed", "1"])
    assert parts.options(None, given)[1] == given
    with pytest.raises(parts.NotRun, match="part absent"):
        next(iter(parts.check("some", None, arguments)()))
