"""Tiny models on the interpreted device: Transformers' tokens, recordings, and one answer in every batch."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.kernels.gpu.ops import GpuOps
from pageturner.models.load import load_model

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from support import decoding as by_hand  # noqa: E402
from support.engines import GOLDENS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def decoding(
    model: str, monkeypatch: pytest.MonkeyPatch, *, graphs: bool = True, kv: str = "float32"
) -> tuple[by_hand.Decoding, GpuOps]:
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    ops = GpuOps(fake_gpu.FakeDriver(), 64 << 20, graphs)
    weights = "auto" if model.endswith("quant") else "float32"
    decoder = load_model(GOLDENS / f"{model}.gguf", ops, dtype=weights)
    return by_hand.Decoding(decoder, ops, dtype=kv), ops


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_greedy_tokens_equal_transformers_and_recordings_are_used(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = np.load(GOLDENS / f"{model}.npz")
    runs, ops = decoding(model, monkeypatch)
    prompt = golden["prompt_0"].tolist()
    tokens, logprobs = runs.greedy("p", prompt, 6)
    assert tokens == golden["greedy_0"][:6].tolist()
    np.testing.assert_allclose(logprobs, golden["logprobs_0"][:6], atol=1e-3)
    assert ops.graphs is not None
    assert len(ops.graphs.recorded) == 1
    assert ops.driver.replayed >= 3


def test_batches_chunks_and_recordings_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = [5, 9, 33, 7, 1, 60, 2, 11, 40], [8, 8, 21, 3, 50]
    alone, _ = decoding("tiny_llama_quant", monkeypatch, graphs=False, kv="float16")
    truth = {name: alone.step([(name, tokens)])[0] for name, tokens in (("one", one), ("two", two))}
    crowd, ops = decoding("tiny_llama_quant", monkeypatch, kv="float16")
    got = [crowd.step([("one", one[:4]), ("two", two[:2])])]
    for at in range(3):  # steps that only decode: the second is recorded
        got.append(crowd.step([("one", one[4 + at : 5 + at]), ("two", two[2 + at : 3 + at])]))
    got.append([*crowd.step([("one", one[7:])]), np.empty((0, truth["one"].shape[1]), np.float32)])
    for column, name in enumerate(("one", "two")):
        assert (np.concatenate([step[column] for step in got]) == truth[name]).all()
    assert ops.driver.replayed == 2


def test_experts_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = np.load(GOLDENS / "experts_mixtral.npz")
    runs, ops = decoding("experts_mixtral", monkeypatch)
    prompt = golden["prompt_0"].tolist()[:6]
    other = by_hand.Decoding(
        load_model(GOLDENS / "experts_mixtral.gguf", by_hand.backend("reference"), dtype="float32"),
        by_hand.backend("reference"),
    )
    expected, got = other.step([("p", prompt)])[0], runs.step([("p", prompt)])[0]
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert "experts.fp32.few" in ops.driver.launched
