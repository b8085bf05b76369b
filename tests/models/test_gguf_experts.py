"""Mixtures of experts from GGUF files: against Transformers, and against themselves in other batches."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.formats.gguf import open_gguf
from pageturner.models.load import load_model
from support.decoding import Decoding, assert_greedy, assert_logits, backend, in_chunks
from support.smollm2 import GOLDENS

BACKENDS = ["reference", "native"]
MODELS = ["experts_mixtral", "experts_qwen3moe"]
FILES = [*MODELS, *(f"{model}_quant" for model in MODELS)]


def decoding(file: str, ops_name: str, *, dtype: str = "float32", **storage: int) -> Decoding:
    ops = backend(ops_name)
    return Decoding(load_model(GOLDENS / f"{file}.gguf", ops, dtype=dtype), ops, **storage)  # type: ignore[arg-type]


def golden(file: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / f"{file.removesuffix('_quant')}.npz"))


def test_the_files_are_what_they_should_be() -> None:
    """Stacked experts of both kinds of blocks, beside a router of floats."""
    kinds = {
        name: info.kind for name, info in open_gguf(GOLDENS / f"{FILES[2]}.gguf").tensors.items()
    }
    assert kinds["blk.0.ffn_down_exps.weight"] == "Q4_1"
    assert kinds["blk.1.ffn_gate_exps.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    specs = [load_model(GOLDENS / f"{file}.gguf", backend("reference")).spec for file in MODELS]
    assert [(s.experts.count, s.experts.top_k) for s in specs if s.experts] == [(4, 2), (8, 3)]


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("file", FILES)
def test_logits_equal_transformers(file: str, ops_name: str) -> None:
    """The quantised file stands for the same values."""
    assert_logits(decoding(file, ops_name), golden(file))


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("file", FILES)
def test_greedy_tokens_equal_transformers(file: str, ops_name: str) -> None:
    assert_greedy(decoding(file, ops_name), golden(file))


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_integer_products_stay_near(model: str, ops_name: str) -> None:
    """Activations in 8 bits cost some exactness, and may send a token to another expert."""
    truth, runs = golden(model), decoding(f"{model}_quant", ops_name, dtype="auto")
    expected = truth["logits_0"]
    logits = runs.step([("p", truth["prompt_0"].tolist())])[0]
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.1


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_batches_and_chunks_do_not_change_a_bit(model: str, ops_name: str) -> None:
    truth = golden(model)
    short, long = truth["prompt_0"].tolist(), truth["prompt_1"].tolist()
    sequences = {"short": short, "long": long, "longest": long + short}
    alone = decoding(f"{model}_quant", ops_name, dtype="auto")
    whole = {key: alone.step([(key, tokens)])[0] for key, tokens in sequences.items()}
    for block_size, chunk in ((16, 13), (5, 1)):
        crowd = decoding(
            f"{model}_quant", ops_name, dtype="auto", blocks=200, block_size=block_size
        )
        for key, rows in in_chunks(crowd, sequences, chunk).items():
            np.testing.assert_array_equal(rows, whole[key], err_msg=f"{key} {chunk}")
