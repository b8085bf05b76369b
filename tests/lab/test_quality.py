"""bench/quality.py and quality_types.py: figures against their definitions, on made up and on tiny models."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from pageturner.models.load import load_model
from support.decoding import Decoding, backend

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
sys.path[:0] = [str(ROOT / "bench")]

import quality  # noqa: E402
import quality_types  # noqa: E402


def windows_of(*lengths: int, vocabulary: int = 50) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocabulary, n, dtype=np.int32) for n in lengths]


def logits_for(windows: list[np.ndarray], seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((len(w), 50), dtype=np.float32) * 3 for w in windows]


def test_figures_are_those_of_their_definitions() -> None:
    windows = windows_of(9, 2, 5)
    base, mine = logits_for(windows, 2), logits_for(windows, 3)
    found = quality.loss(base, [m + 7 for m in mine], windows)  # a constant changes no probability
    b, m = (np.concatenate([x[:-1] for x in each]).astype(np.float64) for each in (base, mine))
    targets = np.concatenate([w[1:] for w in windows])
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (b, m))
    rows = np.arange(len(targets))
    centred = [x - x.mean(axis=1, keepdims=True) for x in (b - m, b)]
    assert found.tokens == 8 + 1 + 4
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean(), rel=1e-5)
    assert found.same == (b.argmax(axis=1) == m.argmax(axis=1)).mean()
    assert found.logit_error == pytest.approx(
        np.linalg.norm(centred[0]) / np.linalg.norm(centred[1])
    )
    assert found.perplexity == pytest.approx(np.exp(-q[rows, targets].mean()))
    assert found.base == pytest.approx(np.exp(-p[rows, targets].mean()))
    assert found.change == pytest.approx(found.perplexity / found.base - 1)


def test_equal_logits_lose_nothing() -> None:
    windows = windows_of(6)
    base = logits_for(windows, 2)
    found = quality.loss(base, base, windows)
    assert (found.same, found.logit_error, found.change) == (1, 0, 0)
    assert abs(found.kl) < 1e-12


class Words:
    """A tokenizer of numbers, which puts a 1 before every text."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1] * add_special + [int(word) for word in text.split()]


def test_every_window_begins_as_a_text_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "load_tokenizer", lambda _: Words())
    monkeypatch.setattr(quality, "WINDOW", 4)
    (tmp_path / "text").write_text(" ".join(map(str, range(10, 30))))
    windows = quality.read_windows(tmp_path, tmp_path / "text", 8)
    assert [w.tolist() for w in windows] == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17]]


def test_logits_are_the_decoders_and_can_be_kept(tmp_path: Path) -> None:
    path, windows = GOLDENS / "tiny_llama_quant.gguf", windows_of(20, 7)
    kept = quality.keep(tmp_path / "kept", quality.logits_of(path, quality.EXACT, windows))
    ops = backend("native")
    decoder = load_model(path, ops, dtype="float32", max_positions=20)
    for window, logits in zip(windows, kept, strict=True):
        assert np.array_equal(logits, Decoding(decoder, ops).step([("a", window.tolist())])[0])


def test_the_two_comparisons_of_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's bits against the source, our kernels against the file: a file that is its source loses
    nothing by its bits, and a float file nothing by its kernels but what fp16 KV costs."""
    backend("native")
    quant, floats = GOLDENS / "tiny_llama_quant.gguf", GOLDENS / "tiny_llama.gguf"
    files = {"Q8_0": quant, "F32": floats}
    monkeypatch.setattr(quality_types, "make_file", lambda source, kind, folder: files[kind])
    windows = windows_of(64, 40)
    same, other = quality_types.measure(quant, ["Q8_0", "F32"], windows, tmp_path)
    assert 0 < same.matrices < same.all_matrices
    assert (same.bits.kl, same.bits.logit_error) == (pytest.approx(0, abs=1e-9), 0)
    assert 1e-3 < same.auto.logit_error < same.eight.logit_error < 0.05
    assert other.bits.logit_error > 0.02
    assert other.auto == other.eight
    assert other.auto.logit_error < 1e-3
    assert other.passed
    assert quality_types.shown(other).count("|") == len(quality_types.HEAD) + 1
    assert not list(tmp_path.iterdir())


def fake_quantize(folder: Path, body: str) -> Path:
    script = folder / "llama-quantize"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_files_are_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fake_quantize(tmp_path, 'echo "$5" > "$4"')
    monkeypatch.setattr(quality_types.launch, "find_llama", lambda _: script)
    made = quality_types.make_file(Path("source.gguf"), "Q4_K", tmp_path)
    assert made.read_text() == "Q4_K_S\n"
    fake_quantize(tmp_path, 'echo half > "$4"; echo "no such type"; exit 3')
    assert quality_types.make_file(Path("source.gguf"), "Q4_K", tmp_path) == made
    with pytest.raises(RuntimeError, match="to Q8_0: no such type"):
        quality_types.make_file(Path("source.gguf"), "Q8_0", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama-quantize", "source.Q4_K.gguf"]
