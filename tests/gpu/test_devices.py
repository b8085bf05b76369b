"""Which device is chosen and why, the plan of its memory, the dry run, and what is refused."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.cli import doctor_device
from pageturner.config.settings import EngineConfig
from pageturner.engine import device_trust, devices, machine_limits
from pageturner.errors import EngineFault
from pageturner.kernels.gpu.catalogue import M64, M64_WIDE, M256, M256_WIDE, MANY, height_of
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.models.load import load_model
from pageturner.parallel import drivers
from support.engines import GOLDENS

TINY = GOLDENS / "tiny_llama.gguf"
SMALL: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 16,
}
CLOSED: list[int] = []  # what drivers that were given back had free


def driver(free: int = 1 << 30) -> SimpleNamespace:
    return SimpleNamespace(
        name="Fake",
        architecture=90,
        fingerprint="f",
        version="",
        memory=lambda: (free, 1 << 30),
        alloc=lambda n: 4096,
        clear=lambda *_: None,
        close=lambda: CLOSED.append(free),
        peers=lambda: [True, False, True],
    )


def chosen(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, **about: int
) -> devices.DeviceChoice:
    monkeypatch.setattr(drivers, "open_driver", lambda: driver(**about))
    return devices.choose(config, lambda: devices.needs_of(TINY, config))


def test_auto_is_a_device_of_an_architecture_that_was_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auto = EngineConfig(device="auto")
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: False)
    assert "no NVIDIA GPU" in chosen(monkeypatch, auto).text
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    taken = chosen(monkeypatch, auto)
    assert taken.ops is not None
    assert "sm_90" in taken.text
    monkeypatch.setattr(device_trust, "PROVEN", (80,))
    CLOSED.clear()
    found = chosen(monkeypatch, auto)
    assert (
        found.ops is None,
        "sm_90 have not yet shown on this device" in found.reason,
        len(CLOSED),
    ) == (
        True,
        True,
        1,
    )
    assert chosen(monkeypatch, EngineConfig(device="cuda")).ops is not None


@pytest.mark.parametrize(
    ("settings", "free", "code", "advice"),
    [
        ({}, 1 << 20, "gpu_memory", "--quantization int4"),
        ({"pipeline_parallel_size": 2}, 1 << 30, "gpu_model", "--device cpu"),
    ],
)
def test_what_a_device_cannot_do_is_an_error_or_the_reason_for_the_cpu(
    settings: dict[str, Any], free: int, code: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    CLOSED.clear()
    with pytest.raises(EngineFault, match=advice) as told:
        chosen(monkeypatch, EngineConfig(device="cuda", **settings), free=free)
    assert told.value.code == code
    found = chosen(monkeypatch, EngineConfig(device="auto", **settings), free=free)
    assert (found.ops, found.reason) == (None, told.value.message)
    assert [free, free] == CLOSED


def test_a_latent_kv_is_for_a_device_within_its_bounds() -> None:
    config = EngineConfig(device="cuda", load_format="dummy")
    needs = devices.needs_of(GOLDENS / "families" / "deepseek_v2", config)
    devices.check_model(driver(), needs, config)
    latent = needs.spec.latent
    assert latent is not None
    wide = replace(needs.spec, latent=replace(latent, rank=576, rotary=64), head_dim=640)
    turned = replace(needs.spec, latent=replace(latent, rotary=80), head_dim=96)
    for spec, dtype in ((wide, "auto"), (turned, "auto"), (needs.spec, "float32")):
        other = replace(config, kv_cache_dtype=dtype)
        with pytest.raises(EngineFault) as told:
            devices.check_model(driver(), replace(needs, spec=spec), other)
        assert told.value.code == "gpu_model"


def test_the_largest_step_fills_the_budget() -> None:
    batch = devices.largest_batch(100, 8, 32, 16)
    assert len(batch.tokens) == len(batch.positions) == batch.query_start[-1] == 100
    assert (batch.slots == -1).all()
    assert batch.context_len.tolist() == [32] * len(batch.context_len)
    assert batch.positions.max() == 31
    assert np.diff(batch.query_start)[:7].tolist() == [1] * 7


def test_a_budget_that_was_left_to_the_machine_becomes_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(decoder: Any, ops: Any, budget: int, *rest: Any) -> None:
        if budget > 1024:
            raise EngineFault("gpu_memory", "a step needs more")

    monkeypatch.setattr(devices, "_largest_step", step)
    any_one: Any = object()
    left = devices.dry_run(any_one, any_one, EngineConfig(), 64)
    assert left.max_num_batched_tokens == 1024
    with pytest.raises(EngineFault, match="needs more"):
        devices.dry_run(any_one, any_one, EngineConfig(max_num_batched_tokens=4096), 64)
    assert devices.dry_run(any_one, None, EngineConfig(), 64) == EngineConfig()


def test_engines_that_start_together_size_their_kv_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one sees what the first has left; on the CPU nobody waits."""
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "cache"))
    free, seen, first, on_cpu = [100], [], threading.Event(), threading.Event()

    def start(ops: object, waits: threading.Event) -> None:
        with devices.memory_lock(ops):
            seen.append(free[0])
            first.set()
            assert waits.wait(60)
            free[0] -= seen[-1] * 9 // 10

    one = threading.Thread(target=start, args=(object(), on_cpu))
    one.start()
    assert first.wait(60)
    two = threading.Thread(target=start, args=(object(), on_cpu))
    two.start()
    with devices.memory_lock(None):
        assert seen == [100]
    on_cpu.set()
    one.join(60)
    two.join(60)
    assert seen == [100, 10]


# -- the whole engine on the interpreted device --------------------------------------------------------------
@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("support.fake_gpu", exc_type=ImportError)
    monkeypatch.setenv(drivers.DRIVER, "support.fake_gpu:FakeDriver")
    return module


def test_products_of_every_height_are_launched_before_kv_is_sized(fake_device: Any) -> None:
    """In layers and in the head: what their kernels take of the device's memory is not free for KV."""
    launched: list[tuple[str, int, int]] = []

    class Recorder(fake_device.FakeDriver):  # type: ignore[misc, name-defined]
        def launch(self, kernel: str, grid: Any, arguments: Any) -> None:
            given = dict(
                zip((name for name, _ in self.kernels[kernel].arguments), arguments, strict=True)
            )
            if kernel.startswith("dense"):
                launched.append((kernel, given["M"], given["N"]))

    ops = GpuOps(Recorder(), 64 << 20)
    decoder = load_model(TINY, ops, dtype="auto", max_positions=64)
    config = EngineConfig(max_num_batched_tokens=512, block_size=16)
    devices.smaller_steps(decoder, ops, config, 64)
    for outputs in (decoder.stack.layers[0].o.rows, decoder.head.weight.rows):
        assert {rows for _, rows, n in launched if n == outputs} == set(devices.HEIGHTS)
    crossed = {height_of(rows, 1 << 15) for rows in devices.HEIGHTS} | {
        height_of(rows, 64) for rows in (2, 256)
    }
    assert crossed == {M64, M64_WIDE, M256, M256_WIDE, MANY}, (
        "the bounds of heights are where they were"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llm_on_a_device_gives_the_references_tokens(
    fake_device: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from pageturner import LLM, SamplingParams

    golden = np.load(GOLDENS / "tiny_llama.npz")
    llm = LLM(str(TINY), dtype="float32", kv_cache_dtype="float32", **SMALL)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (found,) = llm.generate([golden["prompt_0"].tolist()], greedy)
    assert found.outputs[0].token_ids == golden["greedy_0"][:6].tolist()
    assert llm.built.device.startswith("cuda (fake")
    assert {"device", "load", "dry_run", "first_step", "kv"} <= llm.built.phases.keys()
    told = capfd.readouterr().err
    assert "sequences of 64 tokens" in told
    (budget,) = (line for line in told.splitlines() if "start on the device: " in line)
    parts = [
        part.strip().rpartition(" ")[0]
        for part in budget.partition("device: ")[2].split(":")[0].split(",")
    ]
    assert parts == [
        "imports",
        "manifest",
        "driver",
        "weights",
        "dry run",
        "first step",
        "proof",
        "KV",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_weights_on_a_device(fake_device: Any, tmp_path: Path) -> None:
    from pageturner import LLM, SamplingParams

    config = json.loads((GOLDENS / "families" / "llama3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    llm = LLM(str(tmp_path), load_format="dummy", **SMALL)
    (found,) = llm.generate(
        [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    assert len(found.outputs[0].token_ids) == 3


@pytest.mark.timeout(300)
def test_the_ceilings_of_a_device_are_measured_and_kept(
    fake_device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pageturner.kernels import peak
    from pageturner.kernels.gpu import ceilings

    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "AT_ONCE", 1)
    device = fake_device.FakeDriver()
    free = device.memory()[0]
    found = ceilings.measure(device, 1 << 16, 64, 0.0)
    assert (found.copy_gb_s > 0, found.bf16_gop_s > 0, device.memory()[0]) == (True, True, free)
    assert any(name.startswith("dense.bf16") for name in device.launched)
    assert machine_limits.limits_of_device("fake") is None
    assert machine_limits.store_ceilings(found)
    slower = peak.Ceilings("fake", found.copy_gb_s / 2, found.bf16_gop_s / 2)
    assert machine_limits.store_ceilings(slower)
    limits = machine_limits.limits_of_device("fake")
    assert limits is not None
    assert limits.read_gb_s == 2 * found.copy_gb_s


@pytest.mark.parametrize(
    ("ranked", "fits"), [("0,1", False), ("0,2", True), ("0,0", True), ("0,3", False)]
)
def test_ranks_have_devices_that_reach_each_other(
    ranked: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(drivers.ORDINALS, ranked)
    two = EngineConfig(device="cuda", tensor_parallel_size=2)
    if fits:
        assert chosen(monkeypatch, two).ops is not None
        return
    with pytest.raises(EngineFault) as caught:
        chosen(monkeypatch, two)
    assert caught.value.code == "gpu_devices"


def test_doctor_tells_the_device_or_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))

    def absent() -> None:
        raise EngineFault("gpu_driver", "the NVIDIA driver is for CUDA 11.8")

    monkeypatch.setattr(drivers, "open_driver", absent)
    lines, data, problems = doctor_device.examine(EngineConfig(model=str(TINY)), True)
    assert "11.8" in lines["CUDA"]
    assert lines["chosen"].startswith("cpu (")
    assert (data["cuda"]["code"], problems) == ("gpu_driver", [])
    problems = doctor_device.examine(EngineConfig(model=str(TINY), device="cuda"), True)[2]
    assert problems == ["the NVIDIA driver is for CUDA 11.8"]
    monkeypatch.setattr(drivers, "open_driver", driver)
    lines, data, problems = doctor_device.examine(
        EngineConfig(model=str(TINY), device="cuda"), False
    )
    assert "sm_90" in lines["CUDA"]
    assert data["cuda"]["reaches"] == [True, False, True]
    assert lines["devices"].startswith("3, ")
    assert lines["compared"] == "not yet: the first start does"
    assert (lines["chosen"].startswith("cuda ("), problems) == (True, [])
