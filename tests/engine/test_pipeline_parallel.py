"""Stages of whole layers against one process: the same bits in every kind, and one end for all."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_divided_models import PROMPTS, WHO, computed, give, of_one
from test_tensor_parallel import children

from pageturner import LLM, SamplingParams
from pageturner.config.settings import EngineConfig
from pageturner.engine.fingerprint import settings_of
from pageturner.errors import EngineFault
from pageturner.kernels.comm import PLACE
from pageturner.kernels.cpu import native_module
from pageturner.parallel import tensor_parallel
from support.decoding import Decoding
from support.deeper import deeper
from support.ranks import ranks

GOLDENS = Path(__file__).parent.parent / "goldens"
TINY = GOLDENS / "tiny_llama.gguf"
pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
# GGUF: dense, quantised, untied; two experts
RECORDED = [
    "tiny_llama",
    "tiny_llama_quant",
    "tiny_llama_untied",
    "experts_mixtral",
    "experts_qwen3moe_quant",
]
# tied; untied; experts; with a window in some layers, in all; norms over all heads; a latent KV
DEEPER = ["llama3", "mistral", "mixtral", "gpt_oss", "gemma2", "olmo2", "deepseek_v2"]


def bits(rows: list[np.ndarray]) -> list[bytes]:
    return [one.tobytes() for one in rows]


# -- logits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECORDED)
def test_bits_of_two_stages_are_those_of_one_process(name: str) -> None:
    path = GOLDENS / f"{name}.gguf"
    expected = bits(computed(*of_one(path, dtype="auto")))
    with ranks(path, 2, stages=True, dtype="auto") as (decoder, ops):
        assert bits(computed(decoder, ops)) == expected


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("family", DEEPER)
def test_bits_of_more_stages_are_those_of_one_process(
    family: str, size: int, tmp_path: Path
) -> None:
    path = deeper(family, 5, tmp_path)
    expected = bits(computed(*of_one(path)))
    with ranks(path, size, stages=True) as (decoder, ops):
        assert bits(computed(decoder, ops)) == expected


def test_bits_do_not_depend_on_threads_or_on_what_is_wanted(tmp_path: Path) -> None:
    path = deeper("mixtral", 4, tmp_path)
    one, ops = of_one(path)
    asked = list(PROMPTS.items())
    expected = Decoding(one, ops).last(asked).tobytes()
    for threads in (1, 3):
        with ranks(path, 3, stages=True, threads=threads) as (decoder, many):
            assert Decoding(decoder, many).last(asked).tobytes() == expected


def test_more_rows_than_a_place_holds_come_whole() -> None:
    """Hidden rows that go to the next stage in several rounds."""
    long = [n % 300 for n in range(1, 1301)]
    asked = [("a", long), ("b", long[::-1])]
    one, ops = of_one(TINY)
    assert 4 * one.spec.dim * 2 * len(long) > PLACE
    expected = Decoding(one, ops, blocks=170).last(asked).tobytes()
    with ranks(TINY, 2, stages=True) as (decoder, many):
        assert Decoding(decoder, many, blocks=170).last(asked).tobytes() == expected


@pytest.mark.parametrize("size", [2, 3])
def test_bits_with_adapters_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    path = deeper("llama3", 4, tmp_path)
    one, ops = of_one(path)
    give(one, "BF16")
    expected = computed(one, ops, WHO)
    with ranks(path, size, stages=True) as (decoder, many):
        give(decoder, "BF16")
        assert bits(computed(decoder, many, WHO)) == bits(expected)
    assert np.abs(expected[0] - computed(one, ops)[0]).max() > 0.1


def test_each_stage_has_its_own_layers_and_their_kv(tmp_path: Path) -> None:
    path = deeper("gemma2", 5, tmp_path)
    with ranks(path, 3, stages=True) as (decoder, ops):
        assert decoder.shard is not None
        first, end = decoder.shard.borders[-2:]
        whole, recent = decoder.kv_specs(4, 4, 16, "float16")
        assert (whole.layers, recent.layers) == (2, 3)
        held = [layer % 2 == 0 for layer in range(first, end)]  # those with a window
        for spec, windowed in ((whole, False), (recent, True)):
            layers = held.count(windowed)
            expected = layers * spec.nbytes // spec.layers // spec.blocks
            assert ops.alloc_kv(spec).memory.shape == (4, expected)


# -- processes -----------------------------------------------------------------------------------------------
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1
)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


def told_of(path: Path, **settings: Any) -> list[Any]:
    """What an engine answers, to the last bit, its fingerprint and what its steps cost."""
    llm = LLM(str(path), threads=2, kv_cache_memory=1 << 20, **settings)
    found: list[Any] = []
    for params in (GREEDY, SAMPLED):
        for one in llm.generate(list(PROMPTS.values()), params):
            found.append((one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs))
    found.append((llm.built.fingerprint, llm.built.needs))
    del llm
    gc.collect()
    return found


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama3", 3),
        ("mixtral", 2),
        pytest.param("gemma2", 3, marks=pytest.mark.slow),
        pytest.param("mistral", 2, marks=pytest.mark.slow),
    ],
)
def test_engines_of_several_processes_answer_as_one(family: str, size: int, tmp_path: Path) -> None:
    """With the same fingerprint, since the bits are the same, and the same costs of a step."""
    path = deeper(family, 4, tmp_path)
    expected = told_of(path)
    assert told_of(path, pipeline_parallel_size=size) == expected
    assert settings_of(expected[-1][0])["tensor_parallel_size"] == 1
    assert not children()


def test_a_stage_that_died_is_named_with_what_ended_it(tmp_path: Path) -> None:
    before = children()
    llm = LLM(
        str(deeper("llama3", 3, tmp_path)),
        pipeline_parallel_size=3,
        threads=1,
        kv_cache_memory=1 << 20,
    )
    mine = sorted(children() - before)
    assert len(mine) == 2
    os.kill(mine[0], signal.SIGKILL)
    with pytest.raises(
        EngineFault, match=r"rank 1 of 3 has ended \(rank 1 of 3: ended by SIGKILL\)"
    ) as caught:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert caught.value.code == "rank_lost"
    assert not children() - before  # the other one too
    del llm, caught


# -- refusals ------------------------------------------------------------------------------------------------
def test_more_stages_than_layers_are_refused_with_what_works() -> None:
    before = children()
    with pytest.raises(
        EngineFault, match=r"2 layers cannot be divided among 3 stages.*may be 1 to 2$"
    ) as caught:
        LLM(str(TINY), pipeline_parallel_size=3, threads=1)
    assert caught.value.code == "pipeline_parallel"
    del caught
    gc.collect()
    assert children() == before


def test_stages_have_all_threads_unless_cores_are_theirs() -> None:
    config = EngineConfig(pipeline_parallel_size=2, threads=4)
    assert [tensor_parallel.threads_of(config, rank) for rank in range(2)] == [4, 4]
    pinned = EngineConfig(pipeline_parallel_size=2, threads=4, pin_threads=True)
    assert [tensor_parallel.threads_of(pinned, rank) for rank in range(2)] == [2, 2]
