"""Hostile model files, made by dice: whatever is in them, a model or a fault that names the file.

A few hundred here in this process, more of them where a case may end by a signal, and for as long as one
likes by bench/fuzz_files.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fuzz_files


def test_some_hundred_hostile_models(tmp_path: Path) -> None:
    outcomes = set()
    for number, path, note in fuzz_files.cases(0, range(200), tmp_path):
        came, findings = fuzz_files.load(path, (fuzz_files.as_api_process, fuzz_files.as_plan))
        assert not findings, f"case {number}: {note}"
        outcomes.update(came)
    assert {
        "model",
        "tokenizer_corrupt",
        "gguf_corrupt",
        "config_corrupt",
        "model_invalid",
    } <= outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_hostile_models_in_processes_with_limits(tmp_path: Path) -> None:
    for number, path, note in fuzz_files.cases(1, range(500), tmp_path):
        assert not fuzz_files.in_child(path, tmp_path)[1], f"case {number}: {note}"


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        ("sum(range(10**12))", "processor time"),
        ("bytearray(3 << 30)", "MemoryError"),
        ("b'x' * (1 << 30)", "memory"),  # beyond what this process may have peaked at before
        ("os.kill(os.getpid(), 9)", "ended by -9"),
        ("os.write(2, b'x')", "on standard error"),
        ("{}['a']", "KeyError"),
    ],
)
def test_what_counts_as_a_finding(
    work: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_files, "WAYS", (lambda path: eval(work, vars(fuzz_files)),))
    if kind == "processor time":  # the others have what a slow machine takes to fill a gigabyte
        monkeypatch.setattr(fuzz_files, "SECONDS", 1)
    monkeypatch.setattr(fuzz_files, "RESIDENT", 50_000)
    _, findings = fuzz_files.in_child(tmp_path, tmp_path)
    assert kind in str(findings)
