"""Every family as a Hugging Face folder: against Transformers, and against itself in other batches."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pageturner import memory
from pageturner.errors import EngineFault
from pageturner.kernels.base import COMPOSED, FEATURES, Ops
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model, open_model
from support.decoding import Decoding, assert_greedy, assert_logits, backend, in_chunks
from support.refusals import engine_fault

FAMILIES = Path(__file__).parents[1] / "goldens" / "families"
NAMES = [
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "opt",
    "bloom",
    "smollm3",
    "granite",
    "granitemoehybrid",
    "olmo2",
    "olmo3",
    "phi3_long",
    "phi4_mini",
    "glm",
    "glm4",
    "starcoder2",
    "gpt_oss",
    "llama4_text",
    "deepseek_v2",
    "gemma",
    "qwen2_moe",
    "seed_oss",
    "exaone4",
    "cohere2",
    "olmoe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2_groups",
    "glm4_moe_lite",
    "minimax_m2",
    "ministral",
    "ministral3",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "arcee",
    "internlm3",
    "stablelm",
    "stablelm_parallel",
    "stablelm_norms",
    "phi",
    "gemma4_e2b",
    "gemma4_31b",
    "gemma4_26b",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granite_h",
    "granite_h_dense",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon_h1",
    "falcon_h1_norm",
]
LENGTHS = {
    "phi4_mini": 512
}  # tokens for which a model is loaded: up to so many it takes its short factors
LONG = ("gemma2", "bloom", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "cohere2")
BACKENDS = ["reference", "native"]


@cache
def loaded(name: str, ops_name: str) -> tuple[Decoder, Ops]:
    """A model in fp32; skips where the backend says that it lacks something."""
    ops = backend(ops_name)
    try:
        return load_model(
            FAMILIES / name, ops, dtype="float32", max_positions=LENGTHS.get(name, 0)
        ), ops
    except EngineFault as fault:
        if ops_name != "native" or "does not compute" not in fault.message:
            raise
        pytest.skip(fault.message)


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FAMILIES / name / "golden.npz"))


def test_every_recorded_family_is_tested() -> None:
    assert {path.name for path in FAMILIES.iterdir()} == set(NAMES)


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, ops_name: str) -> None:
    assert_logits(Decoding(*loaded(name, ops_name)), golden(name))


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name: str, ops_name: str) -> None:
    assert_greedy(Decoding(*loaded(name, ops_name)), golden(name))


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_batches_and_chunks_do_not_change_a_bit(name: str, ops_name: str) -> None:
    truth = golden(name)
    short, long = truth["prompt_0"].tolist(), truth["prompt_1"].tolist()
    times = 5 if name in LONG else 1  # 290 tokens are beyond one softmax segment
    sequences = {"short": short, "long": long, "longest": (long + short) * times}
    alone = Decoding(*loaded(name, ops_name))
    whole = {key: alone.step([(key, tokens)])[0] for key, tokens in sequences.items()}
    for block_size, chunk in ((16, 13), (5, 100)):
        crowd = Decoding(*loaded(name, ops_name), blocks=600 // block_size, block_size=block_size)
        for key, rows in in_chunks(crowd, sequences, chunk).items():
            np.testing.assert_array_equal(rows, whole[key], err_msg=f"{key} {chunk}")


@pytest.mark.parametrize("name", NAMES)
def test_weights_as_stored_give_the_same(name: str) -> None:
    """F16 and BF16 widen exactly, so the reference makes no difference."""
    ops = backend("reference")
    prompt = golden(name)["prompt_0"].tolist()
    model = load_model(FAMILIES / name, ops, max_positions=LENGTHS.get(name, 0))
    stored = Decoding(model, ops).step([("p", prompt)])[0]
    np.testing.assert_array_equal(
        stored, Decoding(*loaded(name, "reference")).step([("p", prompt)])[0]
    )


def test_a_model_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are in BF16: in fp32 they take twice as much."""
    ops = backend("reference")
    file, _, _ = open_model(FAMILIES / "gpt2")
    nbytes = sum(info.nbytes for info in file.tensors.values())
    for free, dtype in ((nbytes - 1, "auto"), (2 * nbytes - 1, "float32")):
        monkeypatch.setattr(memory, "available", lambda free=free: free)
        with engine_fault("GB are free", code="model_memory"):
            load_model(FAMILIES / "gpt2", ops, dtype=dtype)
    monkeypatch.setattr(memory, "available", lambda: nbytes)
    load_model(FAMILIES / "gpt2", ops)


@pytest.mark.slow
def test_a_backend_without_features_is_told_what_a_model_needs() -> None:
    """Each feature is needed by some family, and refused by name where the backend lacks it."""
    refused = set()
    for name in NAMES:
        ops = ReferenceOps()
        for feature in sorted(FEATURES | COMPOSED):
            lacking = Lacking(ops, feature)
            with contextlib.suppress(EngineFault):
                load_model(FAMILIES / name, lacking)  # type: ignore[arg-type]
                continue
            with engine_fault(f"does not compute {feature}", code="model_unsupported"):
                load_model(FAMILIES / name, lacking)  # type: ignore[arg-type]
            refused.add((name, feature))
    assert {feature for _, feature in refused} == (FEATURES | COMPOSED) - {
        "ordered"
    }  # without it the order is undone
    plain = {
        "llama3",
        "qwen2",
        "qwen3",
        "phi3_long",
        "phi4_mini",
        "glm",
        "seed_oss",
        "ernie4_5",
        "internlm3",
    }
    assert {name for name, _ in refused} == set(NAMES) - plain


class Lacking:
    """A backend without one feature."""

    name = "lacking"

    def __init__(self, ops: Ops, feature: str) -> None:
        self._ops = ops
        self.features = ops.features - {feature}

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)
