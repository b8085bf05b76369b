"""Ctrl-C while native code computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, pathlib, signal, sys
from pageturner.interrupt import leaving_at_once

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
try:
    with leaving_at_once([pathlib.Path(sys.argv[1])]):
        print("begun", flush=True)
        {work}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(130)
print("done", flush=True)
"""
NATIVE = 'hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)'  # many minutes in which Python sees no signal


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("work", "said", "kept"),
    [(NATIVE, "", False), ("import time; time.sleep(3600)", "interrupted\n", True)],
)
def test_ctrl_c_ends_it(work: str, said: str, kept: bool, tmp_path: Path) -> None:
    """Nobody but the watcher removes the folder here."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "log").touch()
    words = [sys.executable, "-c", PROGRAM.format(work=work), str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        begun = processor_seconds(process.pid)
        while work == NATIVE and processor_seconds(process.pid) < begun + 0.2:  # it has come to it
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out, folder.exists()) == (130, said, kept)


def test_without_ctrl_c_nothing_changes(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM.format(work="pass"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, tmp_path.exists()) == (0, "begun\ndone\n", True)
