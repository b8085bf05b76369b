"""A kernel that faults: the engine process dies, and the streams go on, unchanged, on the next one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from pageturner.parallel.drivers import DRIVER
from support.engines import GOLDENS
from support.servers import serving

pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from support.faulty_gpu import MARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FLAGS = (
    "--max-num-seqs",
    "3",
    "--max-num-batched-tokens",
    "16",
    "--max-model-len",
    "64",
    "--engine-timeout",
    "60",
)
TOKENS = 20


def streamed(client: httpx.Client) -> str:
    body = {
        "prompt": [5, 9, 33, 7],
        "max_tokens": TOKENS,
        "seed": 3,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    text = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("driver", "device", "restarts"),
    [("FaultyDriver", "cuda", "1.0"), ("VanishingDriver", "auto", "3.0")],
)
def test_a_stream_goes_on_behind_a_fault_on_the_same_device(
    driver: str, device: str, restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not found at once: the CPU, which could compute it, does not take its place."""
    mark = tmp_path / "faulted"
    monkeypatch.setenv(DRIVER, f"support.faulty_gpu:{driver}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(MARK, str(mark))
    with serving(GOLDENS / "tiny_llama.gguf", "--device", device, *FLAGS) as client:
        broken = streamed(client)
        assert mark.exists()
        assert streamed(client) == broken
        one = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).json()
        metrics = client.get("/metrics").text
    assert one["system_fingerprint"].startswith("cuda-")
    told = [
        line for line in metrics.splitlines() if line.startswith("pageturner:engine_restarts_total")
    ]
    assert [line.rpartition(" ")[2] for line in told] == [restarts]
    assert broken
