"""The decoder against Transformers on tiny random models, and against itself in other batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pageturner.kernels.base import Batch
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model
from support import smollm2
from support.decoding import Decoding, backend
from support.smollm2 import GOLDENS

BACKENDS = ["reference", "native"]
MODELS = ["tiny_llama", "tiny_llama_untied", "tiny_llama_quant", "tiny_qwen3"]


def decoding(
    model: str | Path, ops_name: str, *, weights: str = "float32", **storage: object
) -> Decoding:
    ops = backend(ops_name)
    path = GOLDENS / f"{model}.gguf" if isinstance(model, str) else model
    return Decoding(load_model(path, ops, dtype=weights), ops, **storage)  # type: ignore[arg-type]


def prompts(model: str) -> list[list[int]]:
    golden = np.load(GOLDENS / f"{model}.npz")
    return [golden[f"prompt_{i}"].tolist() for i in range(3)]


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model: str, ops_name: str) -> None:
    golden = np.load(GOLDENS / f"{model}.npz")
    runs = decoding(model, ops_name)
    for i, prompt in enumerate(prompts(model)):
        logits = runs.step([(f"p{i}", prompt)])[0]
        expected = golden[f"logits_{i}"]
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_equal_transformers(model: str, ops_name: str) -> None:
    golden = np.load(GOLDENS / f"{model}.npz")
    runs = decoding(model, ops_name)
    for i, prompt in enumerate(prompts(model)):
        tokens, logprobs = runs.greedy(f"p{i}", prompt, 32)
        assert tokens == golden[f"greedy_{i}"].tolist()
        np.testing.assert_allclose(logprobs, golden[f"logprobs_{i}"], atol=2e-4)


@pytest.mark.parametrize("ops_name", BACKENDS)
def test_quantised_weights_stay_near(ops_name: str) -> None:
    """Activations in 8 bits cost some exactness; on a random model with large weights, up to a tenth."""
    golden = np.load(GOLDENS / "tiny_llama_quant.npz")
    runs = decoding("tiny_llama_quant", ops_name, weights="auto")
    logits, expected = runs.step([("p", prompts("tiny_llama_quant")[2])])[0], golden["logits_2"]
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.1


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["tiny_llama_quant", "tiny_qwen3"])
def test_batches_and_chunks_do_not_change_a_bit(model: str, dtype: str, ops_name: str) -> None:
    one, two, three = prompts(model)
    four = (three + two) * 5  # 290 tokens: beyond one softmax segment
    sequences = {"one": one, "two": two, "three": three, "four": four}
    alone = decoding(model, ops_name, weights="auto", dtype=dtype)
    truth = {name: alone.step([(name, tokens)])[0] for name, tokens in sequences.items()}
    for block_size, chunk in ((16, 7), (1, 64), (256, 1000), (5, 1)):
        crowd = decoding(
            model,
            ops_name,
            weights="auto",
            dtype=dtype,
            blocks=1000 // block_size + 8,
            block_size=block_size,
        )
        left = {name: list(tokens) for name, tokens in sequences.items()}
        got: dict[str, list[np.ndarray]] = {name: [] for name in sequences}
        while left:
            chunks = [(name, tokens[: chunk + i]) for i, (name, tokens) in enumerate(left.items())]
            for (name, tokens), logits in zip(chunks, crowd.step(chunks), strict=True):
                got[name].append(logits)
                left[name] = left[name][len(tokens) :]
            left = {name: tokens for name, tokens in left.items() if tokens}
        for name, rows in got.items():
            np.testing.assert_array_equal(
                np.concatenate(rows), truth[name], err_msg=f"{block_size} {chunk}"
            )


@pytest.mark.parametrize("ops_name", BACKENDS)
def test_a_step_without_wanted_rows_only_writes_kv(ops_name: str) -> None:
    ops = backend(ops_name)
    decoder = load_model(GOLDENS / "tiny_llama.gguf", ops)
    kv = ops.alloc_kv(decoder.kv_spec(2, 16, "float32"))
    prompt = np.array(prompts("tiny_llama")[1], np.int32)
    n = len(prompt)

    def batch(start: int, stop: int, wanted: list[int]) -> Batch:
        here = np.arange(start, stop, dtype=np.int32)
        edges, context, rows = (np.array(x, np.int32) for x in ([0, stop - start], [stop], wanted))
        return Batch(
            prompt[start:stop], here, edges, context, np.array([[1, 0]], np.int32), here + 16, rows
        )

    nothing = decoder.forward(batch(0, n - 1, []), kv)
    assert nothing.shape == (0, 320)
    assert nothing.dtype == np.float32
    last = decoder.forward(batch(n - 1, n, [0]), kv).copy()
    whole = decoder.forward(batch(0, n, [n - 1]), kv)
    np.testing.assert_array_equal(last, whole)
    np.testing.assert_allclose(
        last[0], np.load(GOLDENS / "tiny_llama.npz")["logits_1"][-1], atol=1e-4
    )


def test_backends_agree_on_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # what `auto` rounds activations to depends on the instruction set
    native = backend("native")
    monkeypatch.setattr(
        ReferenceOps,
        "default_activation_bits",
        lambda _, kind: native.default_activation_bits(kind),
    )
    tokens = prompts("tiny_llama_quant")[2]
    logits = [
        decoding("tiny_llama_quant", name, weights="auto").step([("p", tokens)])[0]
        for name in BACKENDS
    ]
    scale = np.abs(logits[0]).max()
    assert (
        np.abs(logits[0] - logits[1]).max() < 0.02 * scale
    )  # one activation may round the other way


def test_rotary_tables_end_where_asked() -> None:
    ops = backend("reference")
    full = load_model(GOLDENS / "tiny_llama.gguf", ops)
    short = load_model(GOLDENS / "tiny_llama.gguf", ops, max_positions=64)
    assert full.spec.context == short.spec.context == 2048
    assert [d.stack.layers[0].rope.cos.shape for d in (full, short)] == [(2048, 8), (64, 8)]


# -- SmolLM2 -------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("index", [0, 17, 42, 77])
def test_smollm2_greedy_equals_transformers(index: int) -> None:
    """Equal up to the first difference, which must be a near-tie."""
    path = GOLDENS / "smollm2_greedy.npz"
    if not path.exists():
        pytest.skip("smollm2_greedy.npz was not recorded")
    golden = np.load(path)
    start, stop = golden["prompt_starts"][index : index + 2]
    runs = decoding(smollm2.model_path(), "native", blocks=128)
    tokens, logprobs = runs.greedy("p", golden["prompt_ids"][start:stop].tolist(), 64)
    expected = golden["tokens"][index]
    same = int((np.array(tokens) == expected).cumprod().sum())
    assert same == 64 or golden["gaps"][index, same] < 1e-3
    np.testing.assert_allclose(logprobs[:same], golden["logprobs"][index, :same], atol=2e-3)


@pytest.mark.model
def test_smollm2_loss_equals_transformers() -> None:
    """Every token of a text, in fp32: logprobs within 2e-3, the same likeliest token but for near-ties."""
    golden = np.load(GOLDENS / "smollm2_loss.npz")
    runs = decoding(smollm2.model_path(), "native", blocks=160)
    for i, ids in enumerate(golden["ids"][:2]):  # two windows of four: enough
        rows = runs.step([(f"w{i}", ids.tolist())])[0][:-1].astype(np.float64)
        logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        of_text = logprobs[np.arange(len(rows)), ids[1:]]
        np.testing.assert_allclose(-of_text, golden["nll"][i], atol=2e-3)
        best, theirs = rows.argmax(axis=1), golden["top"][i]
        gaps = rows.max(axis=1) - rows[np.arange(len(rows)), theirs]
        assert (gaps[best != theirs] < 1e-3).all()


@pytest.mark.model
def test_smollm2_as_shipped_stays_near_fp32() -> None:
    ids = np.load(GOLDENS / "smollm2_loss.npz")["ids"][0, :256].tolist()
    path = smollm2.model_path()
    shipped = decoding(path, "native", weights="auto", dtype="float16", blocks=32)
    exact = decoding(path, "native", blocks=32)
    a, b = (runs.step([("p", ids)])[0].astype(np.float64) for runs in (shipped, exact))
    a, b = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (a, b))
    assert (np.exp(b) * (b - a)).sum(axis=1).mean() < 0.006  # KL
    assert (a.argmax(axis=1) == b.argmax(axis=1)).mean() > 0.95


@pytest.mark.model
@pytest.mark.parametrize(("weights", "bound"), [("float32", 1e-3), ("auto", 0.08)])
def test_smollm2_backends_agree(weights: str, bound: float) -> None:
    """The integer kernels may round an activation the other way, and thirty layers carry that on."""
    ids = np.load(GOLDENS / "smollm2_loss.npz")["ids"][1, :24].tolist()
    path = smollm2.model_path()
    a, b = (
        decoding(path, name, weights=weights, dtype="float16").step([("p", ids)])[0]
        for name in ("reference", "native")
    )
    assert np.abs(a - b).max() < bound * np.abs(a).max()
