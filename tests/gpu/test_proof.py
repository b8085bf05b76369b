"""A device shows at its first start that it computes right; one that does not is refused, and remembered."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import device_trust, devices
from pageturner.errors import EngineFault
from pageturner.models.load import load_model
from pageturner.parallel import drivers
from support.engines import GOLDENS

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from pageturner.kernels.gpu import proof  # noqa: E402
from pageturner.kernels.gpu.ops import GpuOps  # noqa: E402
from pageturner.kernels.gpu.steps import WORK  # noqa: E402

Wrong = Callable[[np.ndarray], None]
LENGTH = 18  # shorter than what is compared: nothing may be read behind the tables of positions
LARGE = ("qk_norm_rope_kv_write", "gated", "sample", "edit", "forbid", "lora")


class Driver(fake_gpu.FakeDriver):
    """One that is taken for a device. kernel, output, wrong: what its launches do to an argument of kernels
    whose names begin so, to the first of its floats."""

    version = "CUDA 13000, kernels k"

    def __init__(
        self, kernel: str = "", output: str = "out", wrong: Wrong = lambda x: None
    ) -> None:
        super().__init__()
        self.wrong = kernel, output, wrong
        self.one_table = False  # every work of attention reads the blocks of the first one
        self.one_segment = False  # every work of few rows is of the first segment
        self.stale_tokens = False  # zeros stand for the tokens that were chosen last
        self.zeros = self.alloc(1 << 12)
        self.clear(self.zeros, 1 << 12)
        self.copies = True  # whether anything is copied within the device

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[float]) -> None:
        names = [name for name, _ in self.kernels[kernel].arguments]
        if (
            (self.one_table or self.one_segment)
            and self.recording is None
            and kernel.startswith("attend")
        ):
            address = int(arguments[names.index("works")])
            count = WORK * (grid[0] // int(arguments[names.index("kv_heads")]))
            works = np.frombuffer((ctypes.c_byte * (4 * count)).from_address(address), np.int32)
            works[::WORK] = works[0] if self.one_table else works[::WORK]
            works[4::WORK] = 0 if self.one_segment else works[4::WORK]
        if self.stale_tokens and kernel.startswith("embed"):
            arguments = [*arguments]
            arguments[names.index("chosen")] = self.zeros
        super().launch(kernel, grid, arguments)
        beginning, output, wrong = self.wrong
        if self.recording is None and beginning and kernel.startswith(beginning):
            address = int(arguments[names.index(output)])
            nbytes = 4096 if kernel.startswith(LARGE) else 64
            wrong(np.frombuffer((ctypes.c_byte * nbytes).from_address(address), np.float32))

    def copy(self, *arguments: int) -> None:
        if self.copies or self.recording is not None:
            super().copy(*arguments)


def last_bit(x: np.ndarray) -> None:
    x.view(np.uint32)[:] ^= 1


def twice(x: np.ndarray) -> None:
    x *= 2


def no_number(x: np.ndarray) -> None:
    x[:] = np.nan


def next_token(x: np.ndarray) -> None:
    x.view(np.int32)[:] ^= 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(proof, "crowds", lambda *_: [3, 20])
    monkeypatch.setattr(proof, "CROWDS", (20,))
    monkeypatch.setattr(proof, "POSITIONS", 40)
    monkeypatch.setattr(proof, "CHUNK", 20)
    monkeypatch.setattr(proof, "TOKENS", 20)
    monkeypatch.setattr(proof, "OTHERS", (0, 0, 0, 2))
    kept = tmp_path / "proofs.json"
    monkeypatch.setattr(device_trust, "results_file", lambda: kept)
    return kept


def subject_of(driver: Driver, model: str, kv: str = "float16") -> proof.Subject:
    ops = GpuOps(driver, 64 << 20)
    decoder = load_model(GOLDENS / model, ops, dtype="auto", max_positions=LENGTH)
    return proof.Subject(ops, decoder.stack, decoder.head, decoder.kv_spec(1, 16, kv), LENGTH)


def self_test(driver: Driver, model: str = "tiny_llama_quant", mark: str = "m") -> None:
    ops = GpuOps(driver, 64 << 20)
    decoder = load_model(GOLDENS / f"{model}.gguf", ops, dtype="auto", max_positions=LENGTH)
    spec = decoder.kv_spec(1, 16, "float16")
    device_trust.self_test(decoder, ops, spec, mark, LENGTH)


def compare(driver: Driver, form: str, model: str = "tiny_llama.gguf", fault: str = "") -> None:
    """What is compared as forms that begin so, with a fault of the driver once the model is loaded."""
    found = [
        one for one in proof.comparisons(subject_of(driver, model)) if one.form.startswith(form)
    ]
    assert found
    if fault:
        setattr(driver, fault, not getattr(driver, fault))
    for one in found:
        one.run()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_device_that_is_right_is_asked_once(small: Path) -> None:
    driver = Driver()
    held = None
    for _ in range(2):
        self_test(driver)
        launched, driver.launched = driver.launched, []
        held = held or launched
    assert held
    assert not driver.launched
    (device,) = json.loads(small.read_text())["devices"].items()
    key, record = device
    assert key == "fake, sm_90, CUDA 13000, kernels k"
    assert {one["text"] for one in record["forms"].values()} == {"right"}
    assert sorted(record["models"]["m"]) == sorted(record["forms"])
    assert driver.replayed


MUTANTS: list[tuple[str, str, Wrong, str, str]] = [
    ("groups", "out", twice, "product", "a product with .* is wrong"),
    ("groups", "out", no_number, "product", "a product with .* is wrong"),
    (
        "groups.4.32.fp16.many",
        "out",
        last_bit,
        "product",
        "a product with .* has other bits among 20 rows",
    ),
    ("attend.float16.64.many", "out", twice, "attention", "attention in float16 is wrong"),
    (
        "attend.float16.64.few",
        "out",
        last_bit,
        "attention",
        "attention in float16 has other bits among",
    ),
    ("head_norm", "out", twice, "rows", "an RMSNorm is wrong"),
    ("rotate", "out", twice, "rows", "a rotation is wrong"),
    ("elementwise.act_mul", "out", twice, "rows", "an activation is wrong"),
    ("qk_norm_rope_kv_write", "q", twice, "layers", "a layer is wrong"),
    ("gated", "out", twice, "layers", "a layer is wrong"),
    ("edit", "logits", last_bit, "edits", "edits or masks"),
    ("forbid", "logits", last_bit, "edits", "edits or masks"),
    ("sample.draw", "ids", next_token, "draws", "tokens are not drawn"),
    ("sample.cut", "ids", next_token, "draws", "tokens are not drawn"),
    ("lora_shrink", "h", twice, "adapters in F32", "what an adapter"),
    ("lora_expand", "y", twice, "adapters in BF16", "what an adapter"),
    ("lora_pick", "h", twice, "adapters in F16", "what an adapter"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kernel", "output", "wrong", "form", "told"), MUTANTS)
def test_a_kernel_that_is_wrong_is_found(
    kernel: str, output: str, wrong: Wrong, form: str, told: str
) -> None:
    model = "tiny_llama_quant.gguf" if "groups" in kernel else "tiny_llama.gguf"
    with pytest.raises(EngineFault, match=told) as found:
        compare(Driver(kernel, output, wrong), form, model)
    assert found.value.code == "gpu_wrong"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "form", "told"),
    [
        ("one_table", "attention", "attention in float16 has other bits among 1 sequences"),
        ("one_table", "steps", "a step gives other bits among 2 sequences"),
        ("copies", "blocks", "a copy of a block"),
        ("stale_tokens", "steps", "a step with tokens that stayed on the device"),
    ],
)
def test_wrong_tables_and_copies_are_found(fault: str, form: str, told: str) -> None:
    with pytest.raises(EngineFault, match=told):
        compare(Driver(), form, fault=fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["", "one_segment"])
def test_a_second_segment_is_compared(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "POSITIONS", 280)
    with pytest.raises(EngineFault, match="among 0 sequences") if fault else nullcontext():
        compare(Driver(), "attention", fault=fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["attention", "blocks", "steps", "layers"])
def test_what_is_right_in_the_same_comparisons_passes(form: str) -> None:
    compare(Driver(), form)


@pytest.mark.parametrize("vocabulary", [70, 32000, 128256])
def test_most_draws_of_a_vocabulary_are_sure_and_some_of_each_kind(vocabulary: int) -> None:
    _, (temperature, top_k, top_p, min_p, _), expected, sure = proof.draws_of(vocabulary)
    assert sure.sum() >= proof.DRAWS - 3
    for asked in (temperature == 0, top_k > 0, top_p < 1, min_p > 0, (top_k == 0) & (top_p == 1)):
        assert (asked & sure).any()
    assert len(set(expected.tolist())) > proof.DRAWS // 2


def test_a_height_that_does_not_fit_is_skipped_and_not_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device with little memory, where nothing else may be left out."""
    monkeypatch.setattr(proof, "crowds", lambda *_: [1 << 20, 3])
    driver = Driver()
    compare(driver, "product")
    monkeypatch.setattr(proof, "crowds", lambda *_: [1 << 20, 20])
    driver.wrong = "dense.fp32.m64", "out", last_bit
    alone = proof._multiplied
    monkeypatch.setattr(
        proof, "_multiplied", lambda ops, x, *rest: _only_crowds(driver, alone, ops, x, *rest)
    )
    with pytest.raises(EngineFault, match="other bits among 20 rows"):
        compare(driver, "product")


def _only_crowds(driver: Driver, work: Callable[..., Any], ops: GpuOps, x: Any, *rest: Any) -> Any:
    """The fault is there from two rows on."""
    wrong, driver.wrong = driver.wrong, driver.wrong if len(x) > 1 else ("", "out", last_bit)
    try:
        return work(ops, x, *rest)
    finally:
        driver.wrong = wrong


def results(*forms: tuple[str, str]) -> list[proof.Comparison]:
    """Comparisons of these forms, which find what the second of each says; "": nothing."""

    def run(text: str) -> None:
        if text:
            raise EngineFault("gpu_wrong", text)

    return [proof.Comparison(form, lambda text=text: run(text)) for form, text in forms]  # type: ignore[misc]


def test_a_form_is_distrusted_and_not_the_device(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(drivers, "open_driver", lambda: driver)
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    quant, other = GOLDENS / "tiny_llama_quant.gguf", GOLDENS / "tiny_llama.gguf"
    auto, kv8 = EngineConfig(device="auto"), EngineConfig(device="auto", kv_cache_dtype="int8")

    def chosen(path: Path, config: EngineConfig = auto) -> Any:
        return devices.choose(config, lambda: devices.needs_of(path, config))

    mark = devices.needs_of(quant, auto).mark
    assert mark != devices.needs_of(other, auto).mark
    ran = results(("rows", ""), ("product with odd weights", "a product is wrong"))
    monkeypatch.setattr(proof, "comparisons", lambda *_: ran)
    with pytest.raises(
        EngineFault, match=r"a product is wrong.*'product with odd weights'"
    ) as found:
        self_test(driver, mark=mark)
    assert found.value.code == "gpu_wrong"
    assert (chosen(quant).ops, chosen(quant).reason) == (None, found.value.message)
    assert chosen(other).ops is not None, "a model of other forms goes on"

    (form,) = devices.needs_of(
        other, kv8
    ).forms  # of attention, which is known before anything is loaded
    monkeypatch.setattr(proof, "comparisons", lambda *_: results((form, "attention is wrong")))
    with pytest.raises(EngineFault, match="attention is wrong"):
        self_test(driver, mark="whoever")
    assert chosen(other).ops is not None
    assert "attention is wrong" in chosen(other, kv8).reason
    monkeypatch.setattr(proof, "code_digest", lambda: "other code")
    assert chosen(other, kv8).ops is not None, "what was wrong by other code says nothing"


def test_only_forms_that_are_new_are_compared_and_a_mended_one_is_trusted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, ran = Driver(), []

    def comparison(form: str, fails: bool = False) -> proof.Comparison:
        def run() -> None:
            ran.append(form)
            if fails:
                raise EngineFault("gpu_wrong", "no")

        return proof.Comparison(form, run)

    for forms in (["a", "b"], ["a", "c"]):
        monkeypatch.setattr(
            proof, "comparisons", lambda *_, forms=forms: [comparison(one) for one in forms]
        )
        self_test(driver)
    assert ran == ["a", "b", "c"]
    monkeypatch.setattr(proof, "comparisons", lambda *_: [comparison("d", True), comparison("e")])
    with pytest.raises(EngineFault):
        self_test(driver)
    assert device_trust.distrust_reason(driver, "m", ()) is not None
    monkeypatch.setattr(proof, "comparisons", lambda *_: [comparison("d"), comparison("e")])
    self_test(driver)  # who asks for it by --device cuda may find it mended
    assert device_trust.distrust_reason(driver, "m", ()) is None
    assert ran == ["a", "b", "c", "d", "d", "e"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ("families/bloom", "int8"),
        ("families/gemma2", "float16"),
        ("families/gpt_oss", "float16"),
        ("families/llama4_text", "fp8_e4m3"),
        ("experts_qwen3moe.gguf", "bfloat16"),
        ("families/deepseek_v2", "float16"),
    ],
)
def test_it_is_right_with_models_of_many_kinds(model: str, kv: str) -> None:
    """Biases, windows, sinks, chunks, slopes, experts together and apart."""
    proof.check(subject_of(Driver(), model, kv))


def test_auto_takes_a_device_that_has_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(devices, "nvidia_is_here", lambda: True)
    monkeypatch.setattr(drivers, "open_driver", lambda: driver)
    monkeypatch.setattr(device_trust, "PROVEN", ())
    monkeypatch.setattr(proof, "comparisons", lambda *_: results(("rows", "")))
    auto = EngineConfig(device="auto")

    def chosen() -> Any:
        return devices.choose(
            auto, lambda: devices.needs_of(GOLDENS / "tiny_llama_quant.gguf", auto)
        )

    assert "start once with --device cuda" in chosen().reason
    self_test(driver)
    assert chosen().ops is not None


def test_a_file_of_an_older_version_is_as_if_there_were_none(small: Path) -> None:
    small.write_text('{"fake, sm_90, CUDA 13000, kernels k": {"3f": "everything is wrong"}}')
    driver = Driver()
    assert device_trust.distrust_reason(driver, "m", ()) is None
    assert device_trust.summary(driver) == "not yet: the first start does"


def test_what_could_not_be_compared_is_told_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small: Path
) -> None:
    def full() -> None:
        raise EngineFault("gpu_memory", "no room")

    monkeypatch.setattr(proof, "comparisons", lambda *_: [proof.Comparison("rows", full)])
    self_test(Driver())
    assert "not compared: no room" in capfd.readouterr().err
    assert not small.exists()
