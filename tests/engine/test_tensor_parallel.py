"""Several ranks against one: the same tokens, the same bits at the same size, and one end for all."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.engine.fingerprint import settings_of
from pageturner.kernels.cpu import native_module
from pageturner.models.load import load_model
from pageturner.parallel import tensor_parallel
from support.decoding import Decoding, backend
from support.ranks import ranks
from support.refusals import engine_fault
from support.servers import serving

GOLDENS = Path(__file__).parent.parent / "goldens"
pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
CASES = [("tiny_llama", 2), ("tiny_llama", 4), ("tiny_qwen3", 2), ("tiny_llama_untied", 4)]
Rows = list[np.ndarray]


def prompts(model: str) -> list[list[int]]:
    golden = np.load(GOLDENS / f"{model}.npz")
    return [golden[f"prompt_{i}"].tolist() for i in range(3)]


def logits_of(model: str, size: int, threads: int = 1, **load: str) -> Rows:
    """All logits of the three prompts, each in a batch of its own; then of a further token of all at once."""
    path = GOLDENS / f"{model}.gguf"
    if size == 1:
        ops = backend("native")
        return computed(model, Decoding(load_model(path, ops, **{"dtype": "float32", **load}), ops))  # type: ignore[arg-type]
    with ranks(path, size, threads=threads, **load) as (decoder, many):
        return computed(model, Decoding(decoder, many))


def computed(model: str, runs: Decoding) -> Rows:
    asked = [(f"p{i}", prompt) for i, prompt in enumerate(prompts(model))]
    rows = [runs.step([one])[0] for one in asked]
    return [*rows, *runs.step([(name, [7 + i]) for i, (name, _) in enumerate(asked)])]


@pytest.mark.parametrize(("model", "size"), CASES)
def test_logits_are_near_those_of_one_rank(model: str, size: int) -> None:
    for one, many in zip(logits_of(model, 1), logits_of(model, size), strict=True):
        assert np.abs(one - many).max() < 1e-4 * max(1, np.abs(one).max())


@pytest.mark.parametrize(("model", "size"), CASES)
def test_greedy_tokens_equal_those_of_one_rank(model: str, size: int) -> None:
    golden = np.load(GOLDENS / f"{model}.npz")
    with ranks(GOLDENS / f"{model}.gguf", size) as (decoder, ops):
        runs = Decoding(decoder, ops)
        for i, prompt in enumerate(prompts(model)):
            tokens, logprobs = runs.greedy(f"p{i}", prompt, 12)
            assert tokens == golden[f"greedy_{i}"].tolist()[:12]
            np.testing.assert_allclose(logprobs, golden[f"logprobs_{i}"][:12], atol=2e-4)


@pytest.mark.parametrize(
    ("model", "load"),
    [
        ("tiny_llama", {}),
        ("tiny_llama", {"quantization": "int8", "dtype": "auto"}),
        ("tiny_llama_quant", {"dtype": "auto"}),
    ],
)
def test_bits_do_not_depend_on_runs_or_threads(model: str, load: dict[str, str]) -> None:
    first = [rows.tobytes() for rows in logits_of(model, 2, **load)]
    for threads in (1, 3):
        assert [rows.tobytes() for rows in logits_of(model, 2, threads, **load)] == first


def test_a_quantised_model_has_the_same_weights_in_slices() -> None:
    load = {"dtype": "auto", "activation_bits": "15"}
    pairs = zip(
        logits_of("tiny_llama_quant", 1, **load),
        logits_of("tiny_llama_quant", 2, **load),
        strict=True,
    )
    for one, many in pairs:
        assert np.linalg.norm(one - many) < 2e-3 * np.linalg.norm(one)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    asked = [(f"p{i}", prompt) for i, prompt in enumerate(prompts("tiny_llama"))]
    with ranks(GOLDENS / "tiny_llama.gguf", 2) as (decoder, ops):
        together = Decoding(decoder, ops).step(asked)
        runs = Decoding(decoder, ops)
        for rows, (name, tokens) in zip(together, asked, strict=True):
            cut = len(tokens) // 2
            alone = [*runs.step([(name, tokens[:cut])]), *runs.step([(name, tokens[cut:])])]
            assert np.concatenate(alone).tobytes() == rows.tobytes()


@pytest.mark.parametrize("stages", [False, True])
def test_a_wrong_call_leaves_ranks_in_step(stages: bool) -> None:
    with ranks(GOLDENS / "tiny_llama.gguf", 2, stages=stages) as (decoder, ops):
        runs = Decoding(decoder, ops)
        with pytest.raises(ValueError, match="no such token"):
            runs.step([("wrong", [320])])
        assert np.isfinite(runs.step([("right", [1, 2, 3])])[0]).all()


# -- processes -----------------------------------------------------------------------------------------------
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_an_engine_of_two_processes() -> None:
    golden = np.load(GOLDENS / "tiny_llama.npz")
    llm = LLM(
        str(GOLDENS / "tiny_llama.gguf"),
        tensor_parallel_size=2,
        threads=2,
        kv_cache_dtype="float32",
        kv_cache_memory=1 << 20,
    )
    (pid,) = children()
    outputs = llm.generate(prompts("tiny_llama"), GREEDY)
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == golden[f"greedy_{i}"].tolist()[:16]
    assert llm.built.fingerprint.endswith("-tp_2")
    assert settings_of(llm.built.fingerprint)["tensor_parallel_size"] == 2
    assert (
        llm.built.kv_bytes == (llm.built.num_blocks + 1) * 16 * 2 * 2 * 2 * 16 * 4
    )  # of both ranks
    logprobs = replace(GREEDY, logprobs=2, max_tokens=4, prompt_logprobs=1)
    told = llm.generate([prompts("tiny_llama")[0]], logprobs)[0]
    np.testing.assert_allclose(
        [one[0] for one in told.outputs[0].logprobs], golden["logprobs_0"][:4], atol=2e-4
    )
    os.kill(pid, signal.SIGKILL)
    with engine_fault("rank 1 of 2 has ended", code="rank_lost") as caught:
        llm.generate(prompts("tiny_llama"), GREEDY)
    del llm, caught


def test_ranks_end_with_their_engine() -> None:
    config = EngineConfig(
        model=str(GOLDENS / "tiny_llama.gguf"),
        tensor_parallel_size=2,
        threads=2,
        kv_cache_memory=1 << 20,
    )
    before = children()
    built = make_engine(config)
    (pid,) = children() - before
    del built
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def children(of: int = 0, what: bytes = b"parallel.rank") -> set[int]:
    """Processes that another one started, this one if none is said, with so much in their command lines."""
    of = of or os.getpid()
    found = Path(f"/proc/{of}/task/{of}/children").read_text().split()
    return {int(pid) for pid in found if what in Path(f"/proc/{pid}/cmdline").read_bytes()}


def streamed(client: httpx.Client, number: int, then: Callable[[], None] = lambda: None) -> str:
    """The text of a stream. then: done at its tenth piece."""
    body = {
        "prompt": f"the old house {number}",
        "max_tokens": 120,
        "seed": number,
        "temperature": 1.0,
    }
    text, pieces = "", 0
    asked = {**body, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                pieces += 1
                if pieces == 10:
                    then()
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "threads"), [("tensor", "2"), ("pipeline", "1")])
def test_a_rank_is_killed_under_streams_and_they_go_on(kind: str, threads: str) -> None:
    flags = (f"--{kind}-parallel-size", "2", "--threads", threads, "--kv-cache-memory", "4M")
    with serving(GOLDENS / "tiny_llama.gguf", *flags) as client, ThreadPoolExecutor(4) as pool:
        whole = list(pool.map(lambda n: streamed(client, n), range(4)))
        (server,) = children(what=b"pageturner\0serve")
        (engine,) = children(server, b"engine.worker")

        def kill() -> None:
            (rank,) = children(engine)
            os.kill(rank, signal.SIGKILL)

        others = [pool.submit(streamed, client, n) for n in range(1, 4)]
        assert streamed(client, 0, kill) == whole[0]
        assert [other.result(60) for other in others] == whole[1:]
        told = client.get("/metrics").text
        assert re.search(r"^pageturner:engine_restarts_total\{.*\} 1(\.0)?$", told, re.M)
        (engine,) = children(server, b"engine.worker")
        (rank,) = children(engine)
    for pid in (engine, rank):  # both ended with the server
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


BOTH = [
    ({"backend": "reference"}, "--backend reference"),
    ({"speculation": "draft", "draft_model": "x"}, "--speculation draft"),
    ({"speculation": "mtp"}, "--speculation mtp"),
    ({"kv_host_memory": 1 << 20}, "--kv-host-memory"),
    ({"kv_file": "x"}, "--kv-file"),
    ({"prefill_listen": "a:1"}, "--prefill-listen"),
    ({"prefill_from": "a:1"}, "--prefill-from"),
]
OF_STAGES = "--pipeline-parallel-size 2"
REFUSED = [
    *(("tensor_parallel_size", *case) for case in BOTH),
    ("tensor_parallel_size", {"tensor_parallel_size": 65}, "at most 64"),
    *(("pipeline_parallel_size", *case) for case in BOTH),
    ("pipeline_parallel_size", {"backend": "reference"}, f"not go with {OF_STAGES} yet"),
    (
        "pipeline_parallel_size",
        {"tensor_parallel_size": 2},
        f"{OF_STAGES} does not go with --tensor-parallel-size 2",
    ),
    ("pipeline_parallel_size", {"device": "cuda"}, "--device cuda"),
    (
        "pipeline_parallel_size",
        {"pipeline_parallel_size": 65},
        "--pipeline-parallel-size is at most 64",
    ),
]


@pytest.mark.parametrize(("parallel", "settings", "named"), REFUSED)
def test_what_does_not_go_with_ranks_is_refused_by_name(
    parallel: str, settings: dict[str, Any], named: str
) -> None:
    config = EngineConfig(model=str(GOLDENS / "tiny_llama.gguf"), **{parallel: 2, **settings})
    with engine_fault(named, code="bad_setting"):
        tensor_parallel.check(config)


def test_threads_and_cores_are_divided() -> None:
    config = EngineConfig(tensor_parallel_size=3, threads=8)
    assert [tensor_parallel.threads_of(config, rank) for rank in range(3)] == [2, 3, 3]
    assert [tensor_parallel.threads_of(replace(config, threads=1), rank) for rank in range(3)] == [
        1,
        1,
        1,
    ]
    assert [tensor_parallel.cores_of(range(8), rank, 2) for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [tensor_parallel.cores_of(range(2), rank, 4) for rank in range(4)] == [
        [0],
        [0],
        [1],
        [1],
    ]


def test_a_model_that_cannot_be_divided_is_refused_once(capfd: pytest.CaptureFixture[str]) -> None:
    with engine_fault(r"may be 1, 2$"):
        LLM(str(GOLDENS / "tiny_llama_quant.gguf"), tensor_parallel_size=4, threads=4)
    gc.collect()
    assert not children()
    assert "cannot be divided" not in capfd.readouterr().err
