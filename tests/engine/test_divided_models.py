"""What is divided beside dense layers: experts, and adapters. Several ranks against one, and their bits."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from pageturner.kernels.adapters import FIELDS
from pageturner.kernels.base import Ops
from pageturner.kernels.cpu import native_module
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model, open_model
from support.adapters import TOP, random_weights, write_adapter
from support.decoding import Decoding, backend
from support.ranks import ranks

GOLDENS = Path(__file__).parent.parent / "goldens"
FAMILIES = GOLDENS / "families"
pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
# experts alone; with a dense layer; with biases and sinks; beside a shared one, weighed before; GGUF, stacked
EXPERTS = [
    FAMILIES / "mixtral",
    FAMILIES / "qwen3_moe",
    FAMILIES / "gpt_oss",
    FAMILIES / "llama4_text",
    GOLDENS / "experts_mixtral.gguf",
    GOLDENS / "experts_qwen3moe.gguf",
]
PROMPTS = {"a": [5, 9, 33, 71, 8, 250], "b": [7] * 20, "c": list(range(3, 14))}
WHO = {"a": "all", "b": "attention", "d": "mlp"}
FIELDS_OF = {"all": (*FIELDS, *TOP), "attention": ("q", "v"), "mlp": ("gate", "down")}


def computed(
    decoder: Decoder, ops: Ops, adapters: dict[str, str] | None = None
) -> list[np.ndarray]:
    """All logits of the prompts, each alone; then those of a further token of all at once."""
    runs = Decoding(decoder, ops, adapters=adapters)
    alone = [runs.step([one])[0] for one in PROMPTS.items()]
    return [*alone, *runs.step([(name, [7]) for name in PROMPTS])]


def of_one(path: Path, **load: Any) -> tuple[Decoder, Ops]:
    ops = backend("native")
    return load_model(path, ops, **{"dtype": "float32", **load}), ops


def assert_near(one: list[np.ndarray], many: list[np.ndarray], most: float = 1e-4) -> None:
    for a, b in zip(one, many, strict=True):
        assert np.abs(a - b).max() < most * max(1, np.abs(a).max())


# -- experts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("path", EXPERTS, ids=lambda path: path.name)
def test_logits_of_divided_experts_are_near_those_of_one_rank(path: Path, size: int) -> None:
    with ranks(path, size) as (decoder, ops):
        assert_near(computed(*of_one(path)), computed(decoder, ops))


@pytest.mark.parametrize("model", ["experts_mixtral", "experts_qwen3moe"])
def test_greedy_tokens_of_divided_experts_equal_transformers(model: str) -> None:
    golden = np.load(GOLDENS / f"{model}.npz")
    with ranks(GOLDENS / f"{model}.gguf", 2) as (decoder, ops):
        runs = Decoding(decoder, ops)
        for i in range(2):
            expected = golden[f"greedy_{i}"].tolist()
            tokens, logprobs = runs.greedy(f"p{i}", golden[f"prompt_{i}"].tolist(), len(expected))
            assert tokens == expected
            np.testing.assert_allclose(logprobs, golden[f"logprobs_{i}"], atol=3e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text"])
def test_bits_of_divided_experts_depend_neither_on_threads_nor_on_the_batch(name: str) -> None:
    every = []
    for threads in (1, 1, 3):
        with ranks(FAMILIES / name, 2, threads=threads) as (decoder, ops):
            every.append([rows.tobytes() for rows in computed(decoder, ops)])
            together = Decoding(decoder, ops).step(list(PROMPTS.items()))
            assert [rows.tobytes() for rows in together] == every[-1][: len(PROMPTS)]
    assert every[0] == every[1] == every[2]


@pytest.mark.slow
def test_an_engine_of_two_processes_has_experts(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "mixtral", tmp_path / "mixtral")
    shutil.copy(GOLDENS / "tiny_spm.model", tmp_path / "mixtral" / "tokenizer.model")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    told = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path / "mixtral"),
            tensor_parallel_size=size,
            threads=2,
            dtype="float32",
            kv_cache_dtype="float32",
            kv_cache_memory=1 << 20,
        )
        told.append(
            [one.outputs[0].token_ids for one in llm.generate(list(PROMPTS.values()), params)]
        )
        del llm
        gc.collect()
    assert told[0] == told[1]


# -- adapters ------------------------------------------------------------------------------------------------
def give(decoder: Decoder, kind: str) -> None:
    for seed, (name, fields) in enumerate(FIELDS_OF.items()):
        decoder.adapters[name] = decoder.pack_adapter(
            random_weights(decoder.spec, fields, 5, seed, kind)
        )


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize(("family", "size"), [("llama3", 2), ("llama3", 4), ("gemma2", 2)])
def test_logits_with_divided_adapters_are_near_those_of_one_rank(
    family: str, size: int, kind: str
) -> None:
    one, ops = of_one(FAMILIES / family)
    give(one, kind)
    expected = computed(one, ops, WHO)
    with ranks(FAMILIES / family, size) as (decoder, many):
        give(decoder, kind)
        assert_near(expected, computed(decoder, many, WHO), 2e-4)
    assert np.abs(expected[0] - computed(one, ops)[0]).max() > 0.1


def test_bits_with_divided_adapters_depend_neither_on_threads_nor_on_the_batch() -> None:
    every = []
    for threads in (1, 3):
        with ranks(FAMILIES / "llama3", 2, threads=threads) as (decoder, ops):
            give(decoder, "BF16")
            every.append([rows.tobytes() for rows in computed(decoder, ops, WHO)])
            together = Decoding(decoder, ops, adapters=WHO).step(list(PROMPTS.items()))
            assert [rows.tobytes() for rows in together] == every[-1][: len(PROMPTS)]
    assert every[0] == every[1]


def test_an_adapter_is_told_once_and_forgotten_with_its_owner() -> None:
    with ranks(FAMILIES / "llama3", 2) as (decoder, ops):
        give(decoder, "F32")
        first = computed(decoder, ops, WHO)
        calls = ops.comm.native.call
        assert [rows.tobytes() for rows in computed(decoder, ops, WHO)] == [
            r.tobytes() for r in first
        ]
        steps = len(PROMPTS) + 1
        assert (
            ops.comm.native.call - calls == 2 * steps + 3
        )  # hidden and logits; one storage, two meetings
        decoder.adapters.clear()
        gc.collect()
        calls = ops.comm.native.call
        plain = computed(decoder, ops)
        assert ops.comm.native.call - calls == 2 * steps + 3 + 1  # those that are gone, in one call
        assert_near(computed(*of_one(FAMILIES / "llama3")), plain)


TENSOR = {"dtype": "float32", "kv_cache_dtype": "float32"}


@pytest.mark.parametrize(
    ("parallel", "settings"), [("tensor_parallel_size", TENSOR), ("pipeline_parallel_size", {})]
)
def test_an_engine_of_two_processes_has_adapters(
    tmp_path: Path, parallel: str, settings: dict[str, Any]
) -> None:
    model = GOLDENS / "tiny_llama.gguf"
    folder = write_adapter(tmp_path / "adapter", open_model(model)[1], FIELDS)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    told = []
    for size in (1, 2):
        llm = LLM(
            str(model),
            threads=2,
            kv_cache_memory=1 << 20,
            lora={"other": folder},
            **{parallel: size, **settings},
        )
        for lora in ("other", ""):
            outputs = llm.generate(list(PROMPTS.values()), params, lora=lora)
            told.append([one.outputs[0].token_ids for one in outputs])
        del llm
        gc.collect()
    assert told[:2] == told[2:]
    assert told[0] != told[1]
