"""A device shows at its first start that it computes right; one that does not is refused, and remembered."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.config import EngineConfig
from pageturner.errors import EngineFault
from pageturner.models.load import load_model
from pageturner.runtime import device_proofs, devices
from support.engines import GOLDENS

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from pageturner.kernels.gpu import proof  # noqa: E402
from pageturner.kernels.gpu.ops import GpuOps  # noqa: E402

Wrong = Callable[[np.ndarray], None]
LENGTH = 18  # shorter than what is compared: nothing may be read behind the tables of positions


class Driver(fake_gpu.FakeDriver):
    """One that is taken for a device. kernel, output, wrong: what its launches do to an argument of kernels
    whose names begin so, to the first of its floats."""

    version = "CUDA 13000, kernels k"

    def __init__(self, kernel: str = "", output: str = "out", wrong: Wrong = lambda x: None) -> None:
        super().__init__()
        self.wrong = kernel, output, wrong

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[float]) -> None:
        super().launch(kernel, grid, arguments)
        beginning, output, wrong = self.wrong
        if self.recording is None and beginning and kernel.startswith(beginning):
            names = [name for name, _ in self.kernels[kernel].arguments]
            address = int(arguments[names.index(output)])
            nbytes = 4096 if kernel.startswith(("place_heads", "gated")) else 64
            wrong(np.frombuffer((ctypes.c_byte * nbytes).from_address(address), np.float32))


def last_bit(x: np.ndarray) -> None:
    x.view(np.uint32)[:] ^= 1


def twice(x: np.ndarray) -> None:
    x *= 2


def no_number(x: np.ndarray) -> None:
    x[:] = np.nan


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(proof, "crowds", lambda *_: [3, 20])
    monkeypatch.setattr(proof, "CROWDS", (20,))
    monkeypatch.setattr(proof, "POSITIONS", 40)
    monkeypatch.setattr(proof, "CHUNK", 20)
    monkeypatch.setattr(proof, "TOKENS", 20)
    monkeypatch.setattr(proof, "OTHERS", (0, 0, 0, 2))
    kept = tmp_path / "proofs.json"
    monkeypatch.setattr(device_proofs, "proofs_file", lambda: kept)
    return kept


def prove(driver: Driver, model: str = "tiny_llama_quant") -> None:
    ops = GpuOps(driver, 64 << 20)
    decoder = load_model(GOLDENS / f"{model}.gguf", ops, dtype="auto", max_positions=LENGTH)
    device_proofs.prove(decoder, ops, 16, "float16", LENGTH)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_that_is_right_is_asked_once(small: Path) -> None:
    driver = Driver()
    held = None
    for _ in range(2):
        prove(driver)
        launched, driver.launched = driver.launched, []
        held = held or launched
    assert held
    assert not driver.launched
    ((key, forms),) = json.loads(small.read_text()).items()
    assert key == "fake, sm_90, CUDA 13000, kernels k"
    assert list(forms.values()) == ["right"]
    assert driver.replayed


@pytest.mark.parametrize(
    ("kernel", "output", "wrong", "told"),
    [
        ("groups", "out", twice, "a product with .* is wrong"),
        ("groups", "out", no_number, "a product with .* is wrong"),
        ("groups.4.32.some", "out", last_bit, "a product with .* has other bits among 20 rows"),
        ("attend.float16.64.many", "out", twice, "attention in float16 is wrong"),
        ("attend.float16.64.few", "out", last_bit, "attention in float16 has other bits among"),
        ("head_norm", "out", twice, "an RMSNorm is wrong"),
        ("rotate", "out", twice, "a rotation is wrong"),
        ("elementwise.act_mul", "out", twice, "an activation is wrong"),
        ("place_heads", "q", twice, "a layer is wrong"),
        ("gated", "out", twice, "a layer is wrong"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_that_is_wrong_is_refused_and_remembered(
    kernel: str, output: str, wrong: Wrong, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, model = Driver(kernel, output, wrong), "tiny_llama_quant" if "groups" in kernel else "tiny_llama"
    with pytest.raises(EngineFault, match=told) as found:
        prove(driver, model)
    assert found.value.code == "gpu_wrong"
    assert device_proofs.doubt(driver) == found.value.message
    monkeypatch.setattr(proof, "check", lambda *_: None)
    prove(Driver(), model)  # who asks for it by --device cuda may find it mended
    assert device_proofs.doubt(driver) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ("families/bloom", "int8"), ("families/gemma2", "float16"), ("families/gpt_oss", "float16"),
        ("families/llama4_text", "fp8_e4m3"), ("experts_qwen3moe.gguf", "bfloat16"),
    ],
)  # fmt: skip
def test_it_is_right_with_models_of_many_kinds(model: str, kv: str) -> None:
    """Biases, windows, sinks, chunks, slopes, experts together and apart."""
    ops = GpuOps(Driver(), 64 << 20)
    decoder = load_model(GOLDENS / model, ops, dtype="auto", max_positions=LENGTH)
    proof.check(ops, decoder.stack, decoder.head.weight, decoder.kv_spec(1, 16, kv), LENGTH)


def test_auto_takes_a_device_that_has_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    monkeypatch.setattr(devices, "open_driver", lambda: driver)
    monkeypatch.setattr(device_proofs, "PROVEN", ())
    monkeypatch.setattr(proof, "check", lambda *_: None)
    auto = EngineConfig(device="auto")

    def chosen() -> Any:
        return devices.choose(auto, lambda: devices.needs_of(GOLDENS / "tiny_llama_quant.gguf", auto))

    assert "start once with --device cuda" in chosen().reason
    prove(driver)
    assert chosen().ops is not None


def test_what_could_not_be_compared_is_told_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small: Path
) -> None:
    def full(*_: Any) -> None:
        raise EngineFault("gpu_memory", "no room")

    monkeypatch.setattr(proof, "check", full)
    prove(Driver())
    assert "not compared: no room" in capfd.readouterr().err
    assert not small.exists()
