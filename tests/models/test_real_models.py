"""Qwen2.5-Coder and Gemma 3 against Transformers on the same weights. Skipped where the files are absent."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from pageturner.formats.hub import cache_folder
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.base import Ops
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from support.decoding import Decoding, backend
from support.smollm2 import GOLDENS

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
FILES = {
    "qwen2.5-coder": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma3": "gemma3-270m-q4_k_m.gguf",
}
Model = tuple[Decoder, Ops]
NEAR_TIE = 1e-3  # two best logits closer than this: fp32 sums in another order may choose either


@pytest.fixture(params=FILES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    path = cache_folder() / FILES[request.param]
    if not path.is_file():
        pytest.skip(f"{path} is absent: python tests/tools/fetch_models.py {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def native(name: str) -> Model:
    return load(name, "native")


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / f"real_{name}.npz"))


def prompts(name: str) -> list[list[int]]:
    truth = golden(name)
    return [
        truth["prompt_ids"][a:b].tolist() for a, b in itertools.pairwise(truth["prompt_starts"])
    ]


def load(name: str, ops_name: str) -> Model:
    """The model with its weights dequantised."""
    ops = backend(ops_name)
    return load_model(cache_folder() / FILES[name], ops, dtype="float32", max_positions=1024), ops


def agreeing(name: str, chosen: list[int], tokens: np.ndarray, logprobs: np.ndarray) -> int:
    """How many of the chosen prompts go the recorded way to the end; the others must leave it at a near-tie,
    and have the recorded logprobs up to there."""
    truth, whole = golden(name), 0
    for i, ours, values in zip(chosen, tokens, logprobs, strict=True):
        expected = truth["tokens"][i][: len(ours)]
        same = int((ours == expected).cumprod().sum())
        assert same == len(ours) or truth["gaps"][i, same] < NEAR_TIE, truth["names"][i]
        np.testing.assert_allclose(values[:same], truth["logprobs"][i, :same], atol=1e-3)
        whole += same == len(ours)
    return whole


def test_greedy_equals_transformers(name: str, native: Model) -> None:
    """All prompts, decoded in one batch."""
    ids = prompts(name)
    runs = Decoding(*native, blocks=640)
    tokens, logprobs = runs.greedy_together({str(i): p for i, p in enumerate(ids)}, 48)
    assert len(ids) == 24
    assert agreeing(name, list(range(24)), tokens, logprobs) >= 22


def test_logits_equal_transformers(name: str, native: Model) -> None:
    """A sample of a row, and over the whole row the log of the sum of exponentials and the norm."""
    truth, ids = golden(name), prompts(name)
    runs = Decoding(*native, blocks=320)
    for k, i in enumerate(truth["logit_prompts"]):
        row = runs.last([(str(i), ids[i])])[0].astype(np.float64)
        scale = np.abs(truth["logits"][k]).max()
        assert np.abs(row[truth["logit_ids"]] - truth["logits"][k]).max() < 1e-4 * scale
        assert abs(np.logaddexp.reduce(row) - truth["logit_lse"][k]) < 1e-4 * scale
        assert abs(np.linalg.norm(row) / truth["logit_norm"][k] - 1) < 1e-4


def test_the_reference_backend_goes_the_same_way(name: str) -> None:
    """Two short prompts, a few tokens: it computes row by row."""
    ids = prompts(name)
    chosen = sorted(range(24), key=lambda i: len(ids[i]))[:2]
    runs = Decoding(*load(name, "reference"), blocks=24)
    tokens, logprobs = runs.greedy_together({str(i): ids[i] for i in chosen}, 6)
    assert agreeing(name, chosen, tokens, logprobs) >= 1


def test_prompts_reach_beyond_the_window() -> None:
    """Gemma 3 sees 512 tokens in most layers: prompts longer than that, and a path across the border."""
    lengths = np.diff(golden("gemma3")["prompt_starts"])
    assert (lengths > 512).sum() >= 2
    assert ((lengths < 512) & (lengths + 48 > 512)).any()


def test_our_tokenizer_gives_the_recorded_ids(name: str) -> None:
    tokenizer = load_tokenizer(cache_folder() / FILES[name])
    for ids in prompts(name):
        text = (
            tokenizer.decode(ids, skip_special=False)
            if name != "gemma3"
            else tokenizer.decode(ids[1:])
        )
        again = tokenizer.encode(text, add_special=True, parse_special=True)
        assert list(again) == ids
