"""The hash that names a model: every byte of what is read counts, nothing else does."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from pageturner.formats.model_hash import model_files, model_hash, model_marks
from support.hf_folder import make_folder
from support.refusals import engine_fault


def test_a_file_has_the_hash_that_sha256sum_prints(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 999)
    assert model_hash(file) == "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_folder_has_that_of_what_sha256sum_prints(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    names = [file.name for file in model_files(folder)]
    assert {"config.json", "tokenizer.json"} < set(names)
    printed = subprocess.run(
        ["sha256sum", *names], cwd=folder, capture_output=True, check=True
    ).stdout
    assert model_hash(folder) == "sha256-files:" + hashlib.sha256(printed).hexdigest()


def test_each_bit_of_each_file_counts_and_a_readme_does_not(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    whole = model_hash(folder)
    for file in model_files(folder):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        assert model_hash(folder) != whole, file.name
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    (folder / "README.md").write_text("what it is")
    assert model_hash(folder) == whole


def test_marks_tell_a_file_that_was_replaced(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert model_marks(file) == ()
    file.write_bytes(b"one")
    before = model_marks(file)
    other = tmp_path / "other"
    other.write_bytes(b"two")
    other.replace(file)
    assert model_marks(file) != before


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with engine_fault("cannot read the model"):
        model_hash(tmp_path / "nothing.gguf")
