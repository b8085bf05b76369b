"""A server on a device, which is the interpreter here: shares of its kept limits, and random weights."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pageturner import LLM, SamplingParams
from pageturner.engine import machine_limits
from pageturner.kernels.peak import Ceilings
from pageturner.models.load import open_model
from pageturner.parallel.drivers import DRIVER
from support.adapters import ALL, TOP, write_adapter
from support.engines import GOLDENS
from support.servers import serving

pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FLAGS = (
    "--device",
    "cuda",
    "--max-num-seqs",
    "3",
    "--max-num-batched-tokens",
    "32",
    "--max-model-len",
    "128",
    "--engine-timeout",
    "60",
)
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "ignore_eos": True,
    "seed": 1,
}


@pytest.fixture(autouse=True)
def on_the_fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limits of another test, and none of this machine."""
    monkeypatch.setenv(DRIVER, "support.fake_gpu:FakeDriver")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))


def gauges(metrics: str, name: str) -> dict[str, float]:
    """By the value of their only label beside those of every line."""
    found = {}
    for line in metrics.splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.removeprefix(f"{name}{{").rpartition("} ")
            (own,) = (one for one in labels.split(",") if one.startswith(("resource=", "figure=")))
            found[own.partition("=")[2].strip('"')] = float(value)
    return found


@pytest.mark.parametrize("kept", [True, False])
def test_metrics_have_shares_of_what_was_measured_of_the_device(kept: bool) -> None:
    if kept:  # figures that the interpreter comes near to, so that shares are no zeros
        assert machine_limits.store_ceilings(Ceilings("fake", 0.002, 0.004))
    with serving(GOLDENS / "tiny_llama.gguf", *FLAGS) as client:
        body = {"prompt": [5, 9, 33, 7], "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        metrics = client.get("/metrics").text
    limits = gauges(metrics, "pageturner:machine_limit")
    shares = gauges(metrics, "pageturner:utilisation")
    achieved = gauges(metrics, "pageturner:achieved")
    assert achieved["read_gb_s"] > 0
    if not kept:  # what nobody measured is absent, and neither 0 nor the CPU's
        assert limits == {}
        assert shares.keys() == {"kernels"}
        return
    assert limits == {"read_gb_s": 0.004, "int8_gop_s": 0.004, "fp32_gop_s": 0.004}
    assert shares["read"] == pytest.approx(achieved["read_gb_s"] / limits["read_gb_s"])
    assert 0 < shares["compute"] == pytest.approx(achieved["fp32_gop_s"] / limits["fp32_gop_s"])


def test_random_weights_are_served_from_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((GOLDENS / "families" / "llama3" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    with serving(folder, *FLAGS, "--load-format", "dummy") as client:
        chat = client.post("/v1/chat/completions", json=CHAT)
        by_ids = {
            "prompt": [5, 6, 7],
            "max_tokens": 3,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        plain = client.post("/v1/completions", json=by_ids)
    assert chat.status_code == 200, chat.text
    usage = chat.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("user: Hi\nassistant: "), 3)
    assert plain.status_code == 200, plain.text
    assert len(plain.json()["choices"][0]["token_ids"]) == 3
    assert plain.json()["system_fingerprint"].startswith("cuda-sm90")


def test_adapters_are_served_from_a_device_and_read_while_it_answers(tmp_path: Path) -> None:
    model, exact = GOLDENS / "tiny_llama.gguf", {"dtype": "float32", "kv_cache_dtype": "float32"}
    spec = open_model(model)[1]
    folders = {
        name: write_adapter(tmp_path / name, spec, fields, 4, seed, "F32", 1.0)
        for seed, (name, fields) in enumerate({"a": (*ALL, *TOP), "b": ("q", "v")}.items())
    }
    other = write_adapter(tmp_path / "c", open_model(GOLDENS / "families" / "llama3")[1])
    llm = LLM(str(model), lora=folders, backend="reference", kv_cache_memory=1 << 22, **exact)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    names = ["", "a", "b"]
    truth = [
        one.outputs[0].text
        for one in llm.generate(["Hello"] * 3, params, lora=names, progress=False)
    ]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in exact.items()]
    with serving(
        model, *FLAGS, *flags, "--lora", f"a={folders['a']}", "--admin-key", "secret"
    ) as client:

        def ask(name: str) -> str:
            body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json={**body, "model": name or "tiny_llama"})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        def load(name: str, path: Path) -> int:
            body = {"lora_name": name, "lora_path": str(path)}
            key = {"authorization": "Bearer secret"}
            return client.post("/v1/load_lora_adapter", json=body, headers=key).status_code

        with ThreadPoolExecutor(4) as pool:
            first = [pool.submit(ask, name) for name in ("", "a", "a")]
            loaded, refused = pool.submit(load, "b", folders["b"]), pool.submit(load, "c", other)
            assert [one.result() for one in first] == [truth[0], truth[1], truth[1]]
            assert (loaded.result(), refused.result()) == (200, 400)
            assert list(pool.map(ask, names)) == truth
    assert len(set(truth)) == 3
