"""Model specs and weights: what is understood, and that everything else is refused by name."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.formats.gguf import open_gguf
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.gguf_spec import read_gguf_spec as read_spec
from pageturner.models.load import load_model
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import FAMILIES, ModelSpec
from support import gguf_writer as w
from support.decoding import logits
from support.refusals import engine_fault
from support.smollm2 import GOLDENS

OPS = ReferenceOps()
Metadata = dict[str, w.Value]
Tensors = dict[str, w.Tensor]


def changed(
    tmp_path: Path, change: Callable[[Metadata, Tensors], object], base: str = "tiny_llama"
) -> Path:
    """A tiny model with something else in its file."""
    metadata, tensors = w.taken_apart(GOLDENS / f"{base}.gguf")
    change(metadata, tensors)
    path = tmp_path / "changed.gguf"
    path.write_bytes(w.gguf_bytes(metadata, tensors))
    return path


def fault(path: Path) -> EngineFault:
    with engine_fault() as caught:
        load_model(path, OPS)
    return caught.value


# -- what is understood --------------------------------------------------------------------------------------


def test_specs_of_the_tiny_models() -> None:
    llama, untied, qwen = (
        read_spec(open_gguf(GOLDENS / f"{name}.gguf"))
        for name in ("tiny_llama", "tiny_llama_untied", "tiny_qwen3")
    )
    assert llama == ModelSpec(
        arch="llama",
        name="tiny_llama",
        family=FAMILIES["llama"],
        layers=2,
        dim=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=320,
        context=2048,
        eps=float(np.float32(1e-5)),
        rope=RopeSpec(10_000.0, 16, 1.0, interleaved=True),
        tied=True,
        attention_scale=0.25,
    )
    assert (untied.tied, untied.head_dim, untied.kv_heads, untied.rope.base) == (
        False,
        32,
        1,
        500_000.0,
    )
    assert (qwen.family.qk_norm, qwen.rope.interleaved, qwen.attention_scale) == (
        "head",
        False,
        32**-0.5,
    )
    assert (qwen.attention(0, 9).heads, qwen.attention(0, 9).head_dim) == (4, 32)


def test_kv_spec() -> None:
    spec = load_model(GOLDENS / "tiny_qwen3.gguf", OPS).kv_spec(10, 16, "float16")
    assert (spec.layers, spec.blocks, spec.kv_heads, spec.head_dim) == (2, 10, 2, 32)
    assert spec.bytes_per_token == 2 * 2 * 2 * 32 * 2


def test_rotary_tables_are_rounded_once() -> None:
    rope = rope_tables(RopeSpec(1e6, 8, 1.0, interleaved=True), 5000)
    angle = 4999 * 1e6 ** (-2 * 3 / 8)
    assert rope.cos.shape == rope.sin.shape == (5000, 4)
    assert rope.cos[4999, 3] == np.float32(np.cos(angle))
    assert rope.sin[4999, 3] == np.float32(np.sin(angle))
    assert rope.interleaved


def test_linear_scaling_divides_positions() -> None:
    plain = rope_tables(RopeSpec(1e4, 16, 1.0, interleaved=False), 50)
    scaled = rope_tables(RopeSpec(1e4, 16, 4.0, interleaved=False), 200)
    np.testing.assert_array_equal(scaled.cos[::4], plain.cos)


def test_divisors_divide_frequencies() -> None:
    divisors = np.array([1, 2, 4, 8], np.float32)
    scaled = rope_tables(RopeSpec(1e4, 8, 1.0, interleaved=True), 64, divisors)
    plain = rope_tables(RopeSpec(1e4, 8, 1.0, interleaved=True), 64)
    np.testing.assert_array_equal(scaled.sin[:, 0], plain.sin[:, 0])
    np.testing.assert_array_equal(scaled.sin[::8, 3], plain.sin[:8, 3])


def test_linear_scaling_and_divisors_reach_the_model(tmp_path: Path) -> None:
    tokens = list(range(40))
    truth = logits(GOLDENS / "tiny_llama.gguf", tokens)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    linear = logits(changed(tmp_path, lambda m, t: m.update(scaling)), tokens)
    assert np.abs(linear - truth).max() > 0.1
    twos = (0, (8,), np.full(8, 2, np.float32).tobytes())
    divided = logits(changed(tmp_path, lambda m, t: t.update({"rope_freqs.weight": twos})), tokens)
    np.testing.assert_array_equal(divided, linear)
    none = logits(
        changed(tmp_path, lambda m, t: m.update({"llama.rope.scaling.type": "none"})), tokens
    )
    np.testing.assert_array_equal(none, truth)


def test_qwen2_has_biases(tmp_path: Path) -> None:
    """A Qwen2 model made of the Qwen3 one: without its q/k norm, with biases of zero, then of something."""

    def convert(bias: float) -> Callable[[Metadata, Tensors], None]:
        def change(metadata: Metadata, tensors: Tensors) -> None:
            for key in [key for key in metadata if key.startswith("qwen3.")]:
                metadata[key.replace("qwen3", "qwen2")] = metadata.pop(key)
            metadata["general.architecture"] = "qwen2"
            for i in range(2):
                for part, size in (("q", 128), ("k", 64), ("v", 64)):
                    tensors.pop(f"blk.{i}.attn_{part}_norm.weight", None)
                    values = np.full(size, bias, np.float32)
                    tensors[f"blk.{i}.attn_{part}.bias"] = (0, (size,), values.tobytes())

        return change

    tokens = list(range(10))
    zero = logits(changed(tmp_path, convert(0.0), "tiny_qwen3"), tokens)
    some = logits(changed(tmp_path, convert(0.5), "tiny_qwen3"), tokens)
    assert np.isfinite(some).all()
    assert np.abs(some - zero).max() > 0.1


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gptneox", "gemma3n", "mamba", ""])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    error = fault(changed(tmp_path, lambda m, t: m.update({"general.architecture": arch})))
    assert error.code == "model_unsupported"
    assert repr(arch) in error.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("expert_shared_count", 1),
        ("attention.sliding_window", 8),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("rope.scaling.attn_factor", 1.5),
        ("attention.causal", False),
        ("logit_scale", 8.0),
        ("some.new.thing", 1),
        ("some.new.list", [1, 2]),
    ],
)
def test_settings_nobody_computes(tmp_path: Path, key: str, value: w.Value) -> None:
    error = fault(changed(tmp_path, lambda m, t: m.update({f"llama.{key}": value})))
    assert error.code == "model_unsupported"
    assert (value if key == "rope.scaling.type" else key) in error.message  # type: ignore[operator]


@pytest.mark.parametrize(
    ("key", "value"), [("expert_count", 0), ("logit_scale", 1.0), ("attention.causal", True)]
)
def test_settings_that_are_off_do_no_harm(tmp_path: Path, key: str, value: w.Value) -> None:
    load_model(changed(tmp_path, lambda m, t: m.update({f"llama.{key}": value})), OPS)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("block_count", 0, "model_invalid"),
        ("block_count", -1, "model_invalid"),
        ("context_length", 1 << 30, "model_invalid"),
        ("attention.head_count", 0, "model_invalid"),
        ("attention.head_count_kv", 3, "model_invalid"),
        ("attention.head_count_kv", [2, 2], "gguf_metadata"),
        ("attention.value_length", 8, "model_invalid"),
        ("rope.dimension_count", 15, "model_invalid"),
        ("rope.dimension_count", 32, "model_invalid"),
        ("rope.freq_base", 0.0, "model_invalid"),
        ("rope.freq_base", float("nan"), "model_invalid"),
        ("attention.layer_norm_rms_epsilon", -1.0, "model_invalid"),
        ("embedding_length", "64", "gguf_metadata"),
        ("embedding_length", 128, "tensor_shape"),
        ("block_count", 3, "tensor_missing"),
        ("block_count", 1, "tensor_unexpected"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, key: str, value: w.Value, code: str) -> None:
    assert fault(changed(tmp_path, lambda m, t: m.update({f"llama.{key}": value}))).code == code


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_settings_are_named(tmp_path: Path, key: str) -> None:
    error = fault(changed(tmp_path, lambda m, t: m.pop(key)))
    assert error.code == "gguf_metadata"
    assert key in error.message


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"],
)
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    error = fault(changed(tmp_path, lambda m, t: t.pop(name)))
    assert (error.code, name in error.message) == ("tensor_missing", True)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate.bias", "blk.2.attn_q.weight", "blk.0.ffn_gate_exps.weight", "x"]
)
def test_unexpected_tensors_are_named(tmp_path: Path, name: str) -> None:
    error = fault(changed(tmp_path, lambda m, t: t.update({name: w.float_tensor(64)})))
    assert (error.code, name in error.message) == ("tensor_unexpected", True)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_k.weight", (64, 32)),
        ("blk.1.ffn_down.weight", (64, 64)),
        ("output_norm.weight", (32,)),
        ("output_norm.weight", (1, 64)),
        ("output.weight", (100, 64)),
        ("rope_freqs.weight", (16,)),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    error = fault(changed(tmp_path, lambda m, t: t.update({name: w.float_tensor(*shape)})))
    assert error.code == "tensor_shape"
    assert name in error.message
    assert str(shape) in error.message


def test_kinds_the_backend_cannot_compute(tmp_path: Path) -> None:
    """Q8_1 weights, which are measured and mapped, but not multiplied."""
    other = (9, (64, 64), bytes(64 * 2 * 40))
    error = fault(changed(tmp_path, lambda m, t: t.update({"blk.0.attn_q.weight": other})))
    assert (error.code, "Q8_1" in error.message) == ("weight_kind", True)


def test_an_unknown_weight_type() -> None:
    with engine_fault("bfloat16"):
        load_model(GOLDENS / "tiny_llama.gguf", OPS, dtype="bfloat16")


def test_damaged_files_load_or_are_refused(tmp_path: Path) -> None:
    """Random damage in front of the data: a decoder and a tokenizer, or an EngineFault, nothing else."""
    sound = (GOLDENS / "tiny_llama.gguf").read_bytes()
    first = min(info.offset for info in open_gguf(GOLDENS / "tiny_llama.gguf").tensors.values())
    draw = random.Random(1)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        raw = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            raw[draw.randrange(first)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(raw)
        for load in (lambda: load_model(path, OPS), lambda: load_tokenizer(path)):
            with contextlib.suppress(EngineFault):
                load()
                refused -= 1
            refused += 1
    assert 50 < refused < 550
