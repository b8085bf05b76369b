"""Families after Llama 3 through whole engines: bits alone are bits in any batch, cut, cache or preemption.

Free blocks are filled with NaN before they are written, so that a read of what no sequence wrote would show.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.engine.fingerprint import settings_of
from pageturner.kernels.cpu import native, native_module
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS, Answer, Model, Setup, answers

usable, why = native_module.supported()
pytestmark = pytest.mark.skipif(not usable, reason=f"native kernels: {why}")

# what is new in attention; the others, and int8, are slow
QUICK = ("smollm3", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "cohere2", "qwen2_moe")
QUICK += ("gemma4_e2b", "gemma4_26b")
OTHERS = (
    "gemma4_31b",
    "granite",
    "olmo3",
    "phi3_long",
    "glm4",
    "starcoder2",
    "hunyuan_v1_dense",
    "ministral3",
)
SETUPS = [
    Setup(token_budget=16, block_size=16),
    Setup(token_budget=64, block_size=5, kv_tokens=640),
    Setup(token_budget=37, block_size=1, policy="prefill_first", prefix_caching=False),
    Setup(token_budget=512, block_size=16, recent_tokens=320),
]


def crowd(count: int = 9) -> list[Request]:
    """Two thirds share a beginning; one is longer than a segment of the kernels."""
    dice = random.Random(4)
    shared = tuple(dice.randrange(3, 300) for _ in range(45))
    requests = []
    for number in range(count):
        own = tuple(
            dice.randrange(3, 300) for _ in range(270 if number == 2 else dice.randint(1, 30))
        )
        params = SamplingParams(
            temperature=number % 2,
            seed=number,
            max_tokens=12,
            logprobs=2,
            stop_ids=(),
            ignore_eos=True,
        )
        requests.append(Request(number, (shared if number % 3 else ()) + own, params))
    return requests


def check(family: str, kv_dtype: str, threads: int) -> None:
    model = Model(GOLDENS / "families" / family, native.NativeOps(threads), kv_dtype=kv_dtype)
    requests = crowd()
    plain = Setup(prefix_caching=False)
    alone: dict[int, Answer] = {}
    for request in requests:
        alone |= answers(model.engine(plain), [request])
    for setup in SETUPS:
        windows = replace(setup, recent_tokens=setup.recent_tokens if model.decoder.window else 0)
        assert answers(model.engine(windows), requests) == alone, setup
    assert len({answer.tokens for answer in alone.values()}) > len(requests) // 2


@pytest.mark.parametrize("family", QUICK)
def test_bits_alone_are_bits_in_a_crowd(family: str) -> None:
    check(family, "float16", 2)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", QUICK + OTHERS)
def test_the_same_of_others_and_other_types(family: str, kv_dtype: str) -> None:
    check(family, kv_dtype, 1)


@pytest.mark.parametrize(
    ("length", "ending"), [(0, "-rope_long"), (512, "-rope_short"), (513, "-rope_long")]
)
def test_a_fingerprint_tells_which_factors_longrope_took(length: int, ending: str) -> None:
    """They are other bits; what else it tells is still read from it."""
    folder = str(GOLDENS / "families" / "phi4_mini")
    config = EngineConfig(model=folder, max_model_len=length, kv_cache_memory=1 << 20, threads=1)
    found = make_engine(config).fingerprint
    assert found.endswith(ending)
    assert settings_of(found)["kv_cache_dtype"] == "float16"
    plain = make_engine(
        replace(config, model=str(GOLDENS / "families" / "smollm3"), max_model_len=0)
    )
    assert plain.fingerprint == found.removesuffix(ending)
