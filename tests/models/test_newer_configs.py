"""config.json of families after Llama 3, as published: what becomes of each setting, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.formats.ggml import dequantise
from pageturner.formats.mapped import TensorInfo
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.base import Tensor
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.hf_names import as_stored
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import load_model, open_model
from pageturner.models.names import Part
from pageturner.models.quantise import quantise
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import LONGEST, ExpertSpec, LatentSpec, ModelSpec, Temper
from pageturner.models.weights import LoadOptions, OpenModel, load_weights, read_part
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of, write_safetensors

FAMILIES = GOLDENS / "families"
PROMPT = list(range(3, 20))
Json = dict[str, Any]
PUBLISHED: dict[str, Json] = json.loads((GOLDENS / "published_configs.json").read_text())
SMOLLM3 = PUBLISHED["smollm3"]
GRANITE4 = PUBLISHED["granite4"]
OLMO3 = PUBLISHED["olmo3"]
PHI4_MINI = PUBLISHED["phi4_mini"]
GLM4 = PUBLISHED["glm4"]
STARCODER2 = PUBLISHED["starcoder2"]
GPT_OSS = PUBLISHED["gpt_oss"]
LLAMA4 = PUBLISHED["llama4"]
DEEPSEEK = PUBLISHED["deepseek"]


def read(values: Json) -> ModelSpec:
    return read_hf_spec(values, "config.json", "x", has_head=True)


def fault(values: Json) -> EngineFault:
    with engine_fault() as caught:
        read(values)
    return caught.value


def test_smollm3_has_no_rotary_embedding_in_every_fourth_layer() -> None:
    spec = read(SMOLLM3)
    assert spec.no_rope == frozenset(range(3, 36, 4))
    assert (spec.rope_of(3).dim, spec.rope_of(4)) == (0, RopeSpec(5e6, 128))
    assert (spec.windowed, spec.window) == (frozenset(), 0)
    assert read(SMOLLM3 | {"no_rope_layers": None}).no_rope == spec.no_rope
    windowed = read(SMOLLM3 | {"use_sliding_window": True, "sliding_window": 64})
    assert (windowed.windowed, windowed.window) == (spec.no_rope, 64)


def test_granite_multiplies() -> None:
    spec = read(GRANITE4)
    assert (spec.attention_scale, spec.embed_scale, spec.residual) == (0.015625, 12.0, 0.22)
    assert (spec.logit_scale, spec.ffn, spec.experts, spec.no_rope) == (
        0.1,
        8192,
        None,
        frozenset(),
    )
    assert read(GRANITE4 | {"position_embedding_type": None}).no_rope == frozenset(range(40))
    plain = {k: v for k, v in GRANITE4.items() if not k.startswith("mamba_") and k != "layer_types"}
    for key in (
        "num_local_experts",
        "num_experts_per_tok",
        "shared_intermediate_size",
        "init_method",
        "normalization_function",
        "position_embedding_type",
    ):
        del plain[key]
    assert read(plain | {"model_type": "granite"}).logit_scale == 0.1


def test_olmo3_stretches_layers_without_a_window_only() -> None:
    spec = read(OLMO3)
    assert spec.rope_of(0) == RopeSpec(5e5, 128)
    rope = spec.rope_of(3)
    assert (rope.kind, rope.factor, rope.original, rope.amplitude) == (
        "yarn",
        8.0,
        8192,
        1.2079441541679836,
    )
    assert (spec.windowed, spec.family.qk_norm, spec.family.pre_norms) == (
        frozenset(i for i in range(32) if i % 4 != 3),
        "wide",
        False,
    )
    assert read(OLMO3 | {"layer_types": None}).windowed == spec.windowed


def test_phi4_mini_chooses_its_factors_by_the_longest_sequence() -> None:
    spec = read(PHI4_MINI)
    rope = spec.rope
    assert (rope.kind, rope.dim, rope.original) == ("longrope", 96, 4096)
    assert rope.amplitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    short, long = rope_tables(rope, 4096), rope_tables(rope, 4097)
    plain = rope_tables(RopeSpec(1e4, 96, amplitude=rope.amplitude), 4097)
    np.testing.assert_array_equal(short.cos, plain.cos[:4096])
    np.testing.assert_array_equal(long.sin[2::2], plain.sin[1:2049])  # half as fast
    assert (
        read(PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"type": "su"}}).rope == rope
    )


def test_glm4_and_starcoder2() -> None:
    spec = read(GLM4)
    assert (spec.rope.dim, spec.rope.interleaved) == (64, True)
    family = spec.family
    assert (family.qkv_bias, family.o_bias, family.post_norms, family.pre_norms) == (
        True,
        False,
        True,
        True,
    )
    spec = read(STARCODER2)
    assert (spec.eps, spec.window, len(spec.windowed), spec.family.act) == (
        1e-5,
        4096,
        30,
        "gelu_tanh",
    )
    assert spec.family.layer_norm


def test_gpt_oss() -> None:
    spec = read(GPT_OSS)
    assert (spec.window, spec.windowed, spec.family.sinks) == (
        128,
        frozenset(range(0, 24, 2)),
        True,
    )
    assert spec.experts == ExpertSpec(32, 4, 2880, True, frozenset(range(24)))
    assert (spec.rope.truncate, spec.rope.amplitude) == (
        False,
        pytest.approx(0.1 * math.log(32) + 1),
    )
    assert read(GPT_OSS | {"layer_types": None}).windowed == spec.windowed


def test_llama4_with_a_vision_tower() -> None:
    spec = read(LLAMA4)
    assert (spec.chunked, spec.window, spec.context) == (True, 8192, LONGEST)
    assert spec.no_rope == frozenset(range(3, 48, 4))
    assert spec.windowed == frozenset(range(48)) - spec.no_rope
    assert spec.attn_temperature == Temper(8192, 0.1)
    assert spec.experts == ExpertSpec(
        16, 1, 8192, False, frozenset(range(48)), 8192, "sigmoid", 1.0, True
    )
    assert np.isfinite(rope_tables(spec.rope, 64).cos).all()  # no range between its two borders


def test_the_temperature_of_queries() -> None:
    factors = Temper(4, 0.5).factors(9)
    expected = [1 + 0.5 * math.log1p((p + 1) // 4) for p in range(9)]
    np.testing.assert_allclose(factors, expected, rtol=1e-7)
    assert factors[2] == 1 < factors[3]


def test_deepseek_v2_lite() -> None:
    spec = read(DEEPSEEK)
    assert spec.latent == LatentSpec(512, 64, 128, 128)
    assert (spec.kv_heads, spec.head_dim, spec.rope.dim, spec.rope.amplitude) == (1, 576, 64, 1.0)
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert spec.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    assert spec.experts is not None
    assert (spec.experts.layers, spec.experts.shared) == (frozenset(range(1, 27)), 2816)
    assert spec.kv_spec(1, 16, "float16").bytes_per_token == 27 * 576 * 2
    assert 2.4e9 < spec.active + spec.vocab * spec.dim < 2.5e9  # 2.4 billion, as its makers say


TEXT: Json = LLAMA4["text_config"]
LONGROPE: Json = PHI4_MINI["rope_scaling"]


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        (SMOLLM3 | {"no_rope_layers": [1, 1, 1, 0]}, "model_invalid", "for each of 36 layers"),
        (SMOLLM3 | {"no_rope_layers": [1] * 37}, "model_invalid", "for each of 36 layers"),
        (SMOLLM3 | {"no_rope_layers": [2] * 36}, "model_invalid", "a 0 or a 1"),
        (SMOLLM3 | {"no_rope_layers": "all"}, "model_invalid", "a 0 or a 1"),
        (
            SMOLLM3 | {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "model_invalid",
            "interval",
        ),
        (GRANITE4 | {"layer_types": ["mamba"] * 40}, "model_invalid", "40 of 40 layers"),
        (GRANITE4 | {"layer_types": None}, "model_unsupported", "a list of mamba"),
        (GRANITE4 | {"layer_types": ["moe"] * 40}, "model_unsupported", "mamba or linear"),
        (GRANITE4 | {"layer_types": ["attention"] * 39}, "model_invalid", "39 of 40"),
        (GRANITE4 | {"num_local_experts": 64}, "model_invalid", "should be 1 to"),
        (
            GRANITE4 | {"normalization_function": "layernorm"},
            "model_unsupported",
            "normalization_function",
        ),
        (GRANITE4 | {"logits_scaling": 0}, "model_invalid", "multiplier of the logits"),
        (
            GRANITE4 | {"residual_multiplier": float("nan")},
            "model_invalid",
            "multiplier of the residual",
        ),
        (GRANITE4 | {"position_embedding_type": "alibi"}, "model_unsupported", "alibi"),
        (OLMO3 | {"layer_types": ["sliding_attention"] * 31}, "model_unsupported", "layer_types"),
        (OLMO3 | {"clip_qkv": 8.0}, "model_unsupported", "clip_qkv"),
        (
            PHI4_MINI | {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 47}},
            "model_invalid",
            "47 numb",
        ),
        (
            PHI4_MINI | {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 48}},
            "model_invalid",
            "divide",
        ),
        (
            PHI4_MINI | {"rope_scaling": LONGROPE | {"long_factor": 3}},
            "config_invalid",
            "a list of numbers",
        ),
        (
            PHI4_MINI | {"rope_scaling": LONGROPE | {"short_mscale": 1.2}},
            "model_unsupported",
            "short_mscale",
        ),
        (PHI4_MINI | {"interpolate_factor": 2}, "model_unsupported", "interpolate_factor"),
        (GLM4 | {"partial_rotary_factor": 0.4}, "model_invalid", "rotary dimension 51"),
        (STARCODER2 | {"use_bias": False}, "model_unsupported", "use_bias"),
        (STARCODER2 | {"norm_type": "rms_norm"}, "model_unsupported", "norm_type"),
        (GPT_OSS | {"swiglu_limit": 6.0}, "model_unsupported", "swiglu_limit"),
        (GPT_OSS | {"experts_per_token": 2}, "model_unsupported", "experts_per_token"),
        (GPT_OSS | {"rope_scaling": None}, "config_invalid", "rope_scaling"),
        (
            GPT_OSS | {"num_experts_per_tok": 33, "experts_per_token": 33},
            "model_invalid",
            "33 of 32",
        ),
        (LLAMA4 | {"text_config": TEXT | {"moe_layers": [48]}}, "model_invalid", "moe_layers"),
        (LLAMA4 | {"text_config": TEXT | {"floor_scale": 0}}, "model_invalid", "floor_scale"),
        (DEEPSEEK | {"q_lora_rank": 2**31}, "model_invalid", "queries of rank"),
        (DEEPSEEK | {"topk_method": "by lot"}, "model_unsupported", "topk_method"),
        (
            DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 7},
            "model_invalid",
            "1 of 7 groups of 64 experts",
        ),
        (DEEPSEEK | {"norm_topk_prob": True}, "model_unsupported", "norm_topk_prob"),
        (DEEPSEEK | {"kv_lora_rank": 2**31}, "model_invalid", "kv_lora_rank"),
        (DEEPSEEK | {"qk_rope_head_dim": 63}, "model_invalid", "rotary dimension 63"),
        (DEEPSEEK | {"n_shared_experts": 2**30}, "model_invalid", "n_shared_experts"),
        (DEEPSEEK | {"routed_scaling_factor": float("inf")}, "model_invalid", "scale of experts"),
    ],
)
def test_what_cannot_be_right_or_is_not_computed(values: Json, code: str, says: str) -> None:
    found = fault(values)
    assert (found.code, says in found.message) == (code, True), found.message


# -- tensors that lie ----------------------------------------------------------------------------------------


def changed(tmp_path: Path, family: str, name: str, shape: tuple[int, ...], value: float) -> Path:
    """A tiny model with one tensor of another shape and value."""
    source = FAMILIES / family
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = tensors_of(source)
    assert name in tensors
    tensors[name] = ("F32", shape, np.full(shape, value, np.float32).tobytes())
    write_safetensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "name", "shape", "value", "code"),
    [
        ("gpt_oss", "model.layers.1.self_attn.sinks", (5,), 1.0, "tensor_shape"),
        ("gpt_oss", "model.layers.1.self_attn.sinks", (4, 1), 1.0, "tensor_shape"),
        ("gpt_oss", "model.layers.0.self_attn.sinks", (4,), float("nan"), "model_invalid"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", (3, 64), 1.0, "tensor_shape"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", (4, 33, 32), 1.0, "tensor_shape"),
        ("olmo2", "model.layers.0.self_attn.q_norm.weight", (8,), 1.0, "tensor_shape"),
        (
            "llama4_text",
            "model.layers.1.feed_forward.experts.gate_up_proj",
            (4, 64, 32),
            1.0,
            "tensor_shape",
        ),
        ("deepseek_v2", "model.layers.0.self_attn.kv_b_proj.weight", (96, 17), 1.0, "tensor_shape"),
        (
            "deepseek_v2",
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            (16, 32),
            1.0,
            "tensor_shape",
        ),
    ],
)
def test_tensors_of_another_shape(
    family: str, name: str, shape: tuple[int, ...], value: float, code: str, tmp_path: Path
) -> None:
    with engine_fault(name.replace(".", "[.]"), code=code):
        load_model(changed(tmp_path, family, name, shape, value), ReferenceOps())


def test_layers_of_another_list_have_other_tensors(tmp_path: Path) -> None:
    """A list of sparse layers that does not fit the file is found by its first tensor."""
    source = FAMILIES / "llama4_text"
    config = json.loads((source / "config.json").read_text()) | {"moe_layers": [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with engine_fault(r"layers\.0\.feed_forward\.shared_expert", code="tensor_missing"):
        load_model(tmp_path, ReferenceOps())


@pytest.mark.parametrize("value", [-60.0, 60.0])
def test_sinks_of_any_size(value: float, tmp_path: Path) -> None:
    """A sink far below all scores changes nothing, one far above takes all of the attention."""
    path = changed(tmp_path, "gpt_oss", "model.layers.1.self_attn.sinks", (4,), value)
    assert np.isfinite(logits(path, PROMPT, dtype="float32")).all()


class Requantised:
    """A folder whose stacked experts lie quantised, with their outputs first, as in gpt-oss's own files."""

    def __init__(self, folder: Path) -> None:
        self._file = open_safetensors(folder)
        self.path = self._file.path
        self.tensors = dict(self._file.tensors)
        self._own: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
        for name, info in self._file.tensors.items():
            if len(info.shape) == 3:
                kind, shape, raw = self._file.tensor(name)
                turned = dequantise(kind, shape, np.frombuffer(raw, np.uint8)).swapaxes(1, 2).copy()
                rows = Tensor(
                    name, "F32", (turned.shape[0] * turned.shape[1], turned.shape[2]), _raw(turned)
                )
                data = quantise(rows, "int8").data
                self._own[name] = ("Q8_0", turned.shape, memoryview(data))
                self.tensors[name] = replace(
                    info, kind="Q8_0", shape=turned.shape, nbytes=data.nbytes
                )

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        return self._own.get(name) or self._file.tensor(name)

    def advise(self, names: Iterable[str], *, needed: bool) -> None:
        return None


def _raw(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_stacked_experts_that_are_quantised(family: str) -> None:
    """They are the same matrices as those that are turned and quantised when they are loaded."""
    floats, spec, layout = open_model(FAMILIES / family)
    file = Requantised(FAMILIES / family)
    stored = as_stored(layout, file.tensors)
    for layer, same in zip(stored.several, layout.several, strict=True):
        for field in ("gates", "ups", "downs"):
            for part, float_part in zip(layer.get(field, ()), same.get(field, ()), strict=True):
                tensor = read_part(file, part)
                expected = quantise(read_part(floats, float_part), "int8")
                assert (tensor.kind, tensor.shape) == ("Q8_0", expected.shape)
                np.testing.assert_array_equal(tensor.data, expected.data)
    load_weights(OpenModel(file, spec, stored), ReferenceOps(), LoadOptions(max_positions=16))


@pytest.mark.parametrize("root", ["language_model.", ""])
def test_llama4_beside_a_vision_tower(root: str, tmp_path: Path) -> None:
    """The same model within another: names with something before them, a head of its own, pictures."""
    source = FAMILIES / "llama4_text"
    text = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    config = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {root + name: tensor for name, tensor in tensors_of(source).items()}
    tensors[f"{root}lm_head.weight"] = tensors[f"{root}model.embed_tokens.weight"]
    tensors["vision_model.class_embedding"] = ("F32", (8,), bytes(32))
    tensors["multi_modal_projector.linear_1.weight"] = ("F32", (8, 8), bytes(256))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    np.testing.assert_array_equal(*(logits(path, PROMPT) for path in (source, tmp_path)))


def test_a_quantised_matrix_is_turned_in_fp32() -> None:
    """What makes keys of the latent is needed the other way round, and its blocks lie along its rows."""
    values = np.random.default_rng(1).standard_normal((24, 64), np.float32)
    stored = quantise(Tensor("kv_b", "F32", (24, 64), _raw(values)), "int8")

    class File:
        tensors = {"kv_b": TensorInfo("kv_b", stored.kind, stored.shape, 0, stored.data.nbytes)}  # noqa: RUF012

        def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
            return stored.kind, stored.shape, memoryview(stored.data)

    part = Part("kv_b", (24, 64), (8, 4, 12), turned=True)  # of two heads of 12 rows the last four
    tensor = read_part(File(), part)  # type: ignore[arg-type]
    rows = dequantise("Q8_0", (24, 64), stored.data)[[8, 9, 10, 11, 20, 21, 22, 23]]
    assert (tensor.kind, tensor.shape) == ("F32", (64, 8))
    np.testing.assert_array_equal(tensor.data.view(np.float32).reshape(64, 8), rows.T)
