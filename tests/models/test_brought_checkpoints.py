"""Layouts of quantised folders that people bring: the very values of their integers and floats, biases and heads
that others of the family lack."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.formats.gguf import open_gguf
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.models.load import open_model, what_becomes
from support import decoding
from support import gguf_writer as w
from support.hf_folder import GOLDENS
from support.quantised_folders import FORMATS, ROUNDED, make_folders
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of, write_safetensors

TOKENS = [7 * i % 64 for i in range(24)]


def logits(path: Path, ops: Any = None, **options: str) -> np.ndarray:
    return decoding.logits(path, TOKENS, ops, **options)


@pytest.mark.parametrize("name", [*FORMATS, *ROUNDED])
def test_the_values_are_those_of_the_layout(name: str, tmp_path: Path) -> None:
    quantised, floats = make_folders(tmp_path, name)
    expected = logits(floats)
    rounded = name in ROUNDED
    got = logits(quantised, dtype="float32")
    if rounded:
        assert np.sqrt(np.mean((got - expected) ** 2)) < 0.05 * expected.std()
    else:
        np.testing.assert_allclose(got, expected, atol=2e-5 * expected.std())
    lines = what_becomes(open_model(quantised).file)
    assert all("exact" in line or rounded for line in lines)
    assert bool(lines) == (re.search("nvfp4|[3567] bits", name) is not None)
    if available_isas():
        got = logits(quantised, NativeOps(1))
        assert np.sqrt(np.mean((got - expected) ** 2)) < 0.05 * expected.std()


# -- parts that others of the family lack ---------------------------------------------------------------------


def changed(folder: Path, family: str, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A tiny model with more tensors."""
    source = GOLDENS / "families" / family
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.npz", "*.safetensors*"))
    found = tensors_of(source)
    found |= {n: ("F32", x.shape, x.astype(np.float32).tobytes()) for n, x in tensors.items()}
    write_safetensors(folder / "model.safetensors", found)
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_is_another_one(
    equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = GOLDENS / "families" / "llama3"
    embed = open_safetensors(source).tensor("model.embed_tokens.weight")
    table = np.frombuffer(embed[2], np.float32).reshape(embed[1])
    head = table if equal else table[::-1]
    with caplog.at_level(logging.WARNING):
        path = changed(
            tmp_path / "tied", "llama3", {"lm_head.weight": head}, tie_word_embeddings=True
        )
        spec = open_model(path).spec
    assert spec.tied == equal
    assert ("lm_head.weight is taken" in caplog.text) != equal
    plain = changed(
        tmp_path / "plain", "llama3", {"lm_head.weight": head}, tie_word_embeddings=False
    )
    np.testing.assert_array_equal(logits(path), logits(plain))


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5])
def test_biases_that_are_there(value: float, tmp_path: Path) -> None:
    """A bias of zeros says nothing, another one is added."""
    rows = {"q_proj": 32, "o_proj": 32}
    names = {f"model.layers.1.self_attn.{n}.bias": np.full(r, value) for n, r in rows.items()}
    path = changed(tmp_path / "m", "llama3", names)
    got, plain = logits(path), logits(GOLDENS / "families" / "llama3")
    assert np.array_equal(got, plain) == (value == 0)


def test_biases_are_those_of_attention_bias(tmp_path: Path) -> None:
    """Qwen2's folder as a llama: the biases that qwen2 always has are found."""
    source = GOLDENS / "families" / "qwen2"
    path = changed(tmp_path / "m", "qwen2", {}, model_type="llama")
    np.testing.assert_array_equal(logits(path), logits(source))


def test_a_bias_of_the_gate_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.bias"
    rows = (
        open_safetensors(GOLDENS / "families" / "llama3")
        .tensors["model.layers.0.mlp.gate_proj.weight"]
        .shape[0]
    )
    logits(changed(tmp_path / "zero", "llama3", {name: np.zeros(rows)}))
    with engine_fault(r"gate_proj\.bias"):
        logits(changed(tmp_path / "one", "llama3", {name: np.ones(rows)}))


def test_biases_of_a_gguf_llama(tmp_path: Path) -> None:
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    rows = open_gguf(GOLDENS / "tiny_llama.gguf").tensors["blk.0.attn_q.weight"].shape[0]
    path = tmp_path / "m.gguf"
    found = []
    for value in (0.0, 0.25):
        bias = (0, (rows,), np.full(rows, value, np.float32).tobytes())
        path.write_bytes(w.gguf_bytes(metadata, tensors | {"blk.0.attn_q.bias": bias}))
        found.append(logits(path))
    np.testing.assert_array_equal(found[0], logits(GOLDENS / "tiny_llama.gguf"))
    assert not np.array_equal(found[0], found[1])
