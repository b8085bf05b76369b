"""Gemma 3 270M gives back what its windows no longer see, and answers as if it kept all of it, to the bit."""

from __future__ import annotations

import random

import pytest

from pageturner.formats.hub import cache_folder
from pageturner.kernels.cpu import native, native_module
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import Model, Setup, answers

GEMMA = cache_folder() / "gemma3-270m-q4_k_m.gguf"
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not GEMMA.is_file(), reason=f"{GEMMA} is absent: tests/tools/fetch_models.py gemma3"
    ),
    pytest.mark.skipif(
        not native_module.supported()[0], reason=f"native kernels: {native_module.supported()[1]}"
    ),
]


def requests() -> list[Request]:
    """Contexts of more than twice the window of 512; the last one goes on behind the first one's prompt."""
    dice = random.Random(4)
    long, other = ([2, *(dice.randrange(3, 200_000) for _ in range(n))] for n in (1200, 1100))
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=24, logprobs=2) for t in (0.0, 1.0, 0.7)
    ]
    return [Request(i, tuple(p), params[i]) for i, p in enumerate((long, other, [*long, 5, 6, 7]))]


def test_giving_back_changes_no_bit() -> None:
    model = Model(GEMMA, native.NativeOps())
    assert (model.decoder.window, model.decoder.windowed, model.decoder.spec.layers) == (
        512,
        15,
        18,
    )
    together = requests()
    truth = answers(model.engine(Setup()), together)
    for setup in (
        Setup(recent_tokens=4096),
        Setup(
            recent_tokens=1024, token_budget=200
        ),  # not enough for three: preemption, or one after another
        Setup(recent_tokens=600, token_budget=64, prefix_caching=False, policy="prefill_first"),
    ):
        engine = model.engine(setup)
        assert answers(engine, together, spread=3) == truth, setup
        stats = engine.scheduler.stats()
        assert stats["recent_blocks_used"] == stats["blocks_used"] == 0
        if setup.recent_tokens == 4096:
            assert stats["cached_tokens"] >= 1200 - 16, "the first prompt was not found again"
