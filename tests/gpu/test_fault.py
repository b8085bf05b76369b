"""A kernel that faults: the engine process dies, and the streams go on, unchanged, on the next one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from pageturner.runtime.devices import DRIVER
from support.engines import GOLDENS
from support.servers import serving

pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from support.faulty_gpu import MARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FLAGS = (
    "--device", "cuda", "--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--max-model-len", "64",
    "--engine-timeout", "60",
)  # fmt: skip
TOKENS = 20


def streamed(client: httpx.Client) -> str:
    body = {"prompt": [5, 9, 33, 7], "max_tokens": TOKENS, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    text = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def test_a_stream_goes_on_behind_a_fault_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "faulted"
    monkeypatch.setenv(DRIVER, "support.faulty_gpu:FaultyDriver")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv(MARK, str(mark))
    with serving(GOLDENS / "tiny_llama.gguf", *FLAGS) as client:
        broken = streamed(client)
        assert mark.exists()
        assert streamed(client) == broken
        metrics = client.get("/metrics").text
    restarts = [line for line in metrics.splitlines() if line.startswith("pageturner:engine_restarts_total")]
    assert [line.rpartition(" ")[2] for line in restarts] == ["1.0"]
    assert broken
