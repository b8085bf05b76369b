"""Mixtures of experts on the interpreted device: every form of weights, whole layers against the reference, a
row's bits among any others, and no visit to the host within a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.formats import ggml
from pageturner.kernels.base import GATED, AttentionShape, Layer, Tensor
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from pageturner.kernels.gpu import experts as module  # noqa: E402
from support import decoding as by_hand  # noqa: E402
from support.engines import GOLDENS  # noqa: E402

REFERENCE = ReferenceOps()
COUNT, WIDE, INNER = 5, 64, 96
slow = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def device() -> GpuOps:
    return GpuOps(gpu_device.make_driver(), 64 << 20, graphs=False)


@pytest.fixture
def ops(device: GpuOps) -> GpuOps:
    device.begin()
    return device


def dequantised(tensor: Tensor) -> Tensor:
    values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
    return Tensor(tensor.name, "F32", tensor.shape, values.reshape(-1).view(np.uint8))


def kind_of(kinds: str, number: int) -> str:
    """Of the experts of a mixture in turn, as in "Q4_0 Q8_0"."""
    every = kinds.split()
    return every[number % len(every)]


def weight(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    """Of fp8 with one scale for each row, as a device keeps it."""
    tensor = grid.weight(kind, rows, columns, seed)
    if kind == "F8_W":
        blocks = tensor.data.reshape(rows, -1, ggml.BY_NAME[kind].nbytes)
        blocks[:, :, :4] = blocks[:, :1, :4]
    return tensor


def mixtures(
    ops: GpuOps, kinds: str, act: str = "silu", biased: bool = False, **how: Any
) -> list[Layer]:
    """A layer of nothing but experts: prepared, and the same of dequantised values for the reference."""
    shapes = {"gate": (INNER, WIDE), "up": (INNER, WIDE), "down": (WIDE, INNER)}
    width = max(ggml.BY_NAME[kind].values for kind in kinds.split() if kind in ggml.BY_NAME)
    if width > 32:
        shapes = {"gate": (256, 256), "up": (256, 256), "down": (256, 256)}
    columns = shapes["gate"][1]
    made = []
    for own in (ops, REFERENCE):

        def packed(tensor: Tensor, own: Any = own) -> Any:
            return own.pack_weight(tensor if own is ops else dequantised(tensor))

        parts, biases = {}, {}
        for part, (name, shape) in enumerate(shapes.items()):
            each = [weight(kind_of(kinds, e), *shape, seed=10 * part + e) for e in range(COUNT)]
            parts[name] = tuple(map(packed, each))
            if biased:
                every = [grid.vector(shape[0], seed=100 * part + e) for e in range(COUNT)]
                biases[f"{name}_bias"] = tuple(map(own.pack_weight, every))
        router = own.pack_weight(grid.weight("F32", COUNT, columns, seed=77))
        if biased:
            biases["router_bias"] = own.pack_weight(grid.vector(COUNT, seed=5))
        experts = Experts(
            router, **parts, top_k=2, normalise=how.pop("normalise", True), **how, **biases
        )
        rope = grid.rope_tables(4, 8, False)
        q, k, v = (own.pack_weight(grid.weight("F32", 16, columns)) for _ in range(3))
        shape = AttentionShape(1, 1, 16, 1.0)
        parts_of_layer = (None, q, k, v, *[None] * 5)
        layer = Layer(*parts_of_layer, shape, rope, 1e-5, act=act, experts=experts)  # type: ignore[arg-type]
        made.append(layer)
        how = {"normalise": experts.normalise, **how}
    ops.prepare_layer(made[0])
    return made


def added(ops: Any, x: np.ndarray, layer: Layer) -> np.ndarray:
    x = ops.on_device(x) if isinstance(ops, GpuOps) else x
    return ops.to_numpy(ops.add_experts(x, x, layer)).copy()


CASES: dict[str, dict[str, Any]] = {
    "Q4_0": {},
    "BF16": {"act": GATED, "biased": True},
    "F32": {"weigh_input": True, "scoring": "sigmoid"},
    "F8_W": {"scale": 1.5, "normalise": False},
    "Q4_0 Q8_0 BF16": {"act": "gelu_tanh", "biased": True},
    "Q4_1": {"biased": True},
    "Q5_1": {"weigh_input": True},
    "Q6_K": {"act": "relu"},
    "F16": {"act": "gelu"},
    "Q4_W": {"biased": True},
    "MXFP4": {"act": GATED, "biased": True},
}
QUICK = ("Q4_0", "BF16", "Q4_0 Q8_0 BF16")


@pytest.mark.parametrize(
    "kinds", [*QUICK, *(pytest.param(k, marks=slow) for k in CASES if k not in QUICK)]
)
def test_a_mixture_of_every_form_equals_the_reference(ops: GpuOps, kinds: str) -> None:
    mine, theirs = mixtures(ops, kinds, **CASES[kinds])
    columns = mine.experts.gate[0].columns  # type: ignore[union-attr]
    x = grid.normal(9, columns, seed=2)
    expected = added(REFERENCE, x, theirs) - x
    assert np.abs(added(ops, x, mine) - x - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize(
    "kinds", ["Q4_0", *(pytest.param(k, marks=slow) for k in ("BF16", "F8_W", "Q8_0"))]
)
def test_a_row_has_its_bits_however_many_chose_its_experts(
    ops: GpuOps, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside rows that choose otherwise, and among a hundred copies of itself, in tiles of both
    heights."""
    mine, _ = mixtures(ops, kinds, biased=True)
    x = grid.normal(9, WIDE, seed=2)
    alone = added(ops, x[4:5], mine)[0]
    ops.begin()
    assert (added(ops, x, mine)[4] == alone).all()
    for many_rows in (1, 1000):
        monkeypatch.setattr(module, "MANY_ROWS", many_rows)
        ops.begin()
        crowd = added(ops, np.concatenate([x[:4], np.repeat(x[4:5], 80, axis=0), x[5:]]), mine)
        assert (crowd[4:84] == alone).all()


def test_a_layer_of_experts_never_waits_for_the_device(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = mixtures(ops, "Q4_0", biased=True, act=GATED)
    x = ops.on_device(grid.normal(3, WIDE))

    def refuse(*_: Any) -> None:
        raise AssertionError("a visit to the host")

    for name in ("download", "upload", "synchronise", "alloc"):
        monkeypatch.setattr(ops.driver, name, refuse)
    before = len(ops.driver.launched)
    ops.add_experts(x, x, mine)
    assert len(ops.driver.launched) - before < 12  # however many experts there are


@pytest.mark.parametrize("outputs", [513, pytest.param(4096, marks=slow)])
def test_a_router_of_many_outputs_is_computed(ops: GpuOps, outputs: int) -> None:
    logits = grid.normal(3, outputs, seed=3)
    for scoring in ("softmax", "sigmoid"):
        ids, weights = ops.route(logits, 7, True, scoring)
        expected = REFERENCE.route(logits, 7, True, scoring)
        assert (ids == expected[0]).all()
        assert np.abs(weights - expected[1]).max() < 1e-6


def test_a_router_of_too_many_is_refused_when_it_is_loaded(ops: GpuOps) -> None:
    mine, _ = mixtures(ops, "F32")
    e = mine.experts
    assert e is not None
    many = replace(e, gate=e.gate[:1] * 4097, up=e.up[:1] * 4097, down=e.down[:1] * 4097)
    with pytest.raises(EngineFault) as told:
        module.GpuExperts.tables(ops.driver, many)
    assert told.value.code == "gpu_model"


# -- models --------------------------------------------------------------------------------------------------
MODELS = {
    "experts_qwen3moe_quant.gguf": "none",
    "families/gpt_oss": "int4",
    "families/llama4_text": "int8",
    "experts_mixtral_quant.gguf": "none",
    "families/gpt_oss ": "none",
    "families/llama4_text ": "none",
    "families/qwen3_moe": "int4",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_models_of_experts_are_recorded_and_equal_the_reference(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    path, quantization = GOLDENS / model.strip(), MODELS[model]
    mine = GpuOps(gpu_device.make_driver(), 64 << 20)
    runs, decoders = [], []
    for own in (mine, REFERENCE):
        decoders.append(load_model(path, own, quantization=quantization, activation_bits="15"))
        runs.append(by_hand.Decoding(decoders[-1], own, dtype="float16"))
    prompt = [5, 9, 33, 7, 1, 60, 2, 11, 40]
    got, expected = (run.step([("p", prompt)])[0] for run in runs)
    off = np.abs(got - expected).max(axis=1)
    # of one row a router may choose otherwise, where two experts are nearly alike
    assert np.sort(off)[-2] < 3e-2 * np.abs(expected).max()
    alone = [runs[0].step([("p", [token])])[0][0] for token in (8, 21, 3)]
    assert mine.driver.replayed == 2
    crowd = by_hand.Decoding(decoders[0], mine, dtype="float16")
    crowd.step([("other", [4, 4, 90]), ("p", prompt)])
    for token, logits in zip((8, 21, 3), alone, strict=True):
        assert (crowd.step([("other", [token]), ("p", [token])])[1][0] == logits).all()
