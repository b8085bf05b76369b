"""Tests of what a start says while it lasts, and the parts of the time that it took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from pageturner import logs
from pageturner.server import server

PROGRAM = """
import time
from pageturner.server import server
server.TELL_START_EVERY = 0.05
notes = server._StartNotes()
for phase in ("", "load", "dry_run"):
    notes.phase = lambda: phase
    time.sleep(0.3)
seconds = float(notes.end())
time.sleep(0.3)
print(seconds)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_start_says_what_it_waits_for(form: str) -> None:
    environment = {**os.environ, logs.VARIABLE: form}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True
    )
    lines = done.stderr.splitlines()
    said = [json.loads(line)["message"] if form == "json" else line for line in lines]
    before = "" if form == "json" else "pageturner: "
    for words in ("the server's parts are imported", "the weights are read and packed", "dry_run"):
        assert any(line.startswith(f"{before}starting: {words} (") for line in said), words
    assert float(done.stdout) >= 0.9


def test_the_parts_of_a_start_add_up() -> None:
    shown = server._parts(2.25, {"find": 0.0012, "load": 1.204, "kv": 0.0, "pace": 0.0961})
    assert shown == " (processes and imports 0.95, load 1.20, pace 0.10)"
    assert sum(map(float, re.findall(r"[\d.]+", shown))) == pytest.approx(2.25)


LEAVES = """
from pageturner.server import server
server.TELL_START_EVERY = 0.001
server._StartNotes()
raise SystemExit(1)
"""


def test_a_start_that_ends_meanwhile_ends_with_its_own_status() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert done.returncode == 1, "not by the signal of the notes"
