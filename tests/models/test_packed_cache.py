"""Packed weights on disk: the same bits without packing; a bad file is replaced, and can do nothing else."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from pageturner.kernels.base import Ops, Tensor
from pageturner.models.load import load_model
from support.decoding import Decoding, backend
from support.engines import GOLDENS
from support.refusals import engine_fault

MODEL = "tiny_llama_quant.gguf"
PROMPT = [("p", [1, 5, 9, 33])]


class Counting:
    """A backend that counts how many matrices it packs."""

    def __init__(self) -> None:
        self.packed = 0
        self._ops = backend("native")

    def pack_weight(self, tensor: Tensor) -> object:
        self.packed += len(tensor.shape) == 2
        return self._ops.pack_weight(tensor)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def logits(path: Path, ops: Ops, cache: Path | str, **options: str) -> np.ndarray:
    decoder = load_model(path, ops, packed_cache=str(cache), **options)  # type: ignore[arg-type]
    return np.asarray(Decoding(decoder, ops).step(PROMPT)[0])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(GOLDENS / MODEL, tmp_path / MODEL))


def loaded(model: Path, cache: Path, **options: str) -> tuple[np.ndarray, int]:
    ops = Counting()
    return logits(model, ops, cache, **options), ops.packed  # type: ignore[arg-type]


def test_the_second_start_packs_nothing_and_computes_the_same_bits(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    without = logits(model, backend("native"), "")
    first, packed = loaded(model, cache)
    again, none = loaded(model, cache)
    assert (packed > 0, none) == (True, 0)
    assert np.array_equal(first, without)
    assert np.array_equal(again, without)
    assert len(list(cache.iterdir())) == 1


def test_other_settings_have_another_file_and_a_changed_model_replaces_its_own(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    loaded(model, cache)
    for options in ({"activation_bits": "8"}, {"dtype": "float32"}, {"quantization": "int8"}):
        assert loaded(model, cache, **options)[1] > 0
        assert loaded(model, cache, **options)[1] == 0
    assert len(list(cache.glob("*.packed"))) == 4
    shutil.copy(GOLDENS / MODEL, tmp_path / "other")
    (tmp_path / "other").replace(model)
    _, packed = loaded(model, cache)
    assert packed > 0
    assert len(list(cache.glob("*.packed"))) == 1, "files of the model as it was are gone"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "index", "other bits"])
def test_a_damaged_file_is_packed_anew_and_said(model: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    whole, packed = loaded(model, cache)
    (file,) = cache.iterdir()
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    elif damage == "flipped":
        raw[200] ^= 1
    elif damage == "empty":
        raw = bytearray()
    elif damage == "index":
        raw[-5] ^= 1
    else:
        raw[8:16] = (1 << 61).to_bytes(8, "little")
    file.write_bytes(raw)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        found, anew = loaded(model, cache)
    assert np.array_equal(found, whole)
    assert 0 < anew <= packed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded(model, cache)[1] == 0, "it was replaced"


def test_a_folder_that_cannot_be_written_hurts_nobody(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(RuntimeWarning, match="could not be kept"):
        _, packed = loaded(model, tmp_path / "cache")
    assert packed > 0


def test_a_backend_without_files_is_refused(model: Path, tmp_path: Path) -> None:
    with engine_fault("packed-cache needs the native backend", code="packed_cache"):
        logits(model, backend("reference"), tmp_path)
