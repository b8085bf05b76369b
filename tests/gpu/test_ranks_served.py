"""Processes with a device each, as users start them: the CPU's tokens, and one end for all. The devices are
interpreted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pageturner import LLM, SamplingParams
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.parallel import drivers, tensor_parallel
from pageturner.parallel.drivers import DRIVER, ORDINALS
from support.engines import GOLDENS
from support.servers import serving

pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXACT = {"dtype": "float32", "kv_cache_dtype": "float32", "kv_cache_memory": 1 << 20}
SMALL = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.fixture(autouse=True)
def on_fake_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRIVER, "support.fake_gpu:FakeDriver")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("model", "logprobs"), [("tiny_llama", None), ("experts_mixtral", 2)])
def test_two_devices_give_the_tokens_of_the_cpu(model: str, logprobs: int | None) -> None:
    """Of whom no logprobs are wanted, steps are begun one ahead: rank 1 has tokens from rank 0's device."""
    prompts = [[5, 9, 33, 7], [8, 8, 21, 1, 2]]
    params = [
        SamplingParams(max_tokens=5, temperature=heat, seed=3, ignore_eos=True, logprobs=logprobs)
        for heat in (0.0, 0.8)
    ]
    found = []
    for how in (
        {"device": "cpu"},
        {"device": "cuda", "tensor_parallel_size": 2, "async_scheduling": True},
    ):
        llm = LLM(str(GOLDENS / f"{model}.gguf"), **EXACT, **SMALL, **how)  # type: ignore[arg-type]
        answers = llm.generate(prompts, params, progress=False)
        found.append([one.outputs[0].token_ids for one in answers])
        if how["device"] == "cuda":
            assert llm.built.fingerprint.startswith("cuda-sm90-interpreted")
            assert llm.built.fingerprint.endswith("-tp_2")
            assert llm.built.engine.async_steps is not None
            assert (llm.built.engine.async_steps.made > 0) == (logprobs is None)
        del llm
    assert found[0] == found[1]


def processes(of: int, what: bytes) -> list[int]:
    """Those that another one started, with so much in their command lines."""
    found = map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split())
    return [pid for pid in found if what in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until(there: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def streamed(client: httpx.Client, then: Callable[[], None] = lambda: None) -> str:
    """The text of a stream. then: done at its third piece."""
    body = {
        "prompt": [5, 9, 33, 7],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, pieces = "", 0
    with client.stream("POST", "/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                pieces += 1
                if pieces == 3:
                    then()
    return text


def test_a_rank_that_is_killed_ends_all_and_streams_go_on() -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**EXACT, **SMALL}.items()]
    several = ("--device", "cuda", "--tensor-parallel-size", "2", "--engine-timeout", "120")
    with serving(GOLDENS / "tiny_llama.gguf", *several, *flags) as client:
        whole = streamed(client)
        for restarts, victim in enumerate((1, 0), 1):
            (server,) = processes(os.getpid(), b"pageturner\0serve")
            wait_until(lambda server=server: processes(server, b"engine.worker"))
            (engine,) = processes(server, b"engine.worker")
            (other,) = processes(engine, b"parallel.rank")
            assert (
                streamed(client, lambda pid=(engine, other)[victim]: os.kill(pid, signal.SIGKILL))
                == whole
            )
            for pid in (engine, other):
                wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
            told = client.get("/metrics").text
            (count,) = re.findall(r"^pageturner:engine_restarts_total\{.*\} (\d+)", told, re.M)
            assert int(count) == restarts


# -- refusals ------------------------------------------------------------------------------------------------
def refused(monkeypatch: pytest.MonkeyPatch, size: int, there: int) -> EngineFault:
    monkeypatch.setenv("PAGETURNER_FAKE_DEVICES", str(there))
    with pytest.raises(EngineFault) as caught:
        LLM(
            str(GOLDENS / "tiny_llama.gguf"),
            **EXACT,
            **SMALL,
            device="cuda",
            tensor_parallel_size=size,
        )  # type: ignore[arg-type]
    return caught.value


def test_too_few_devices_are_refused_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = refused(monkeypatch, 2, 1)
    assert fault.code == "gpu_devices"
    assert "one fake" in fault.message


def test_devices_are_named_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drivers.ordinals(3) == [0, 1, 2]
    monkeypatch.setenv(ORDINALS, "3,1")
    assert drivers.ordinals(2) == [3, 1]
    assert drivers.open_driver(1).ordinal == 1  # type: ignore[attr-defined]
    assert refused(monkeypatch, 2, 3).code == "gpu_devices"  # there is no fourth
    for wrong in ("0", "0,x", "0,-1"):
        monkeypatch.setenv(ORDINALS, wrong)
        with pytest.raises(EngineFault) as caught:
            drivers.ordinals(2)
        assert caught.value.code == "bad_setting"


def test_stages_are_refused_on_devices() -> None:
    config = EngineConfig(device="cuda", pipeline_parallel_size=2)
    with pytest.raises(EngineFault) as caught:
        tensor_parallel.check(config)
    assert caught.value.code == "bad_setting"
    tensor_parallel.check(EngineConfig(device="cuda", tensor_parallel_size=2))
