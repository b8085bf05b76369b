"""Keys that say nothing about the computation are told by their values; those that say something are refused by
name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pageturner.formats.gguf import open_gguf
from pageturner.models.gguf_spec import read_gguf_spec
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.spec import ModelSpec
from support import gguf_writer as w
from support.hf_folder import GOLDENS
from support.refusals import engine_fault

Json = dict[str, Any]
QWEN3_CODER = {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# 1.1386294361119891 times it is 1
R1_QWEN3 = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "attn_factor": 0.8782488562869419,
}


def config(family: str) -> Json:
    """The configuration of a tiny model, without layer types."""
    found: Json = json.loads((GOLDENS / "families" / family / "config.json").read_text())
    return {key: value for key, value in found.items() if key != "layer_types"}


def read(values: Json) -> ModelSpec:
    return read_hf_spec(values, "config.json", "x", has_head=True)


@pytest.mark.parametrize(
    ("family", "added"),
    [
        ("llama3", {"loss_type": "ForCausalLMLoss", "model_max_length": 131072}),
        ("llama3", {"aux_loss_alpha": 0.001, "z_loss_coeff": 1e-4, "use_flash_attn": True}),
        ("llama3", {"num_experts": 0, "n_shared_experts": 0, "moe_layers": [], "extra": {}}),
        ("llama3", {"residual_multiplier": 1.0, "logits_scaling": 1, "embedding_multiplier": 1.0}),
        ("llama3", {"clip_qkv": None, "qk_layernorm": False, "mlp_bias": False, "is_causal": True}),
        ("llama3", {"sliding_window": 8, "rope_interleaved": False, "hidden_dropout": 0.5}),
        ("granite", {"sliding_window": 8}),
        ("glm4", {"sliding_window": 8, "rope_interleave": True}),
        ("olmo2", {"sliding_window": 8, "use_qk_norm": True, "norm_eps": 1e-5}),
        ("deepseek_v2", {"sliding_window": 8}),
        ("qwen3", {"use_qk_norm": True, "qk_norm": True}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 0, "use_qk_norm": True}),
        (
            "starcoder2",
            {
                "layer_norm_epsilon": 1e-5,
                "norm_epsilon": 1e-5,
                "scale_attn_weights": True,
                "scale_attention_softmax_in_fp32": True,
                "attention_softmax_in_fp32": True,
            },
        ),
    ],
)
def test_a_key_that_says_nothing(family: str, added: Json) -> None:
    assert read(config(family) | added) == read(config(family))


@pytest.mark.parametrize(
    ("family", "added"),
    [
        ("llama3", {"use_qk_norm": True}),
        ("llama3", {"residual_multiplier": 0.5}),
        ("llama3", {"logits_scaling": 8.0}),
        ("llama3", {"num_experts": 8}),
        ("llama3", {"shared_expert_intermediate_size": 512}),
        ("llama3", {"clip_qkv": 8.0}),
        ("llama3", {"is_causal": False}),
        ("llama3", {"rope_interleaved": True}),
        ("llama3", {"layer_norm_eps": 0.5}),
        ("gpt2", {"scale_attn_weights": False}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 512}),
        ("starcoder2", {"layer_norm_epsilon": 0.5}),
    ],
)
def test_a_key_that_says_something_is_refused_by_name(family: str, added: Json) -> None:
    with engine_fault(next(iter(added)), code="model_unsupported"):
        read(config(family) | added)


def test_qwen3_coder_as_published() -> None:
    spec = read(QWEN3_CODER)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.shared, spec.windowed) == (128, 0, frozenset())


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [
        (R1_QWEN3, 1.0),
        (R1_QWEN3 | {"attn_factor": 1.0, "finetuned": True}, 0.1 * math.log(4) + 1),
        (R1_QWEN3 | {"attn_factor": 0.5}, (0.1 * math.log(4) + 1) / 2),
        ({"rope_type": "default", "factor": 1.0}, 1.0),
        ({"type": "default", "factor": 1, "rope_theta": 500000.0}, 1.0),
    ],
)
def test_rope_scaling(scaling: Json, amplitude: float) -> None:
    values = config("qwen3")
    values.pop("rope_parameters", None)
    spec = read(values | {"rope_scaling": scaling})
    assert spec.rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_a_default_rope_with_a_factor_is_refused() -> None:
    values = config("qwen3") | {"rope_parameters": {"rope_type": "default", "factor": 4.0}}
    with engine_fault(r"factor = 4\.0"):
        read(values)


@pytest.mark.parametrize(
    ("family", "added", "windowed"),
    [
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, {0, 1}),
        ("starcoder2", {"sliding_window": 8}, {0, 1}),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, {0, 1}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, set()),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            {1},
        ),
    ],
)
def test_a_window_is_where_transformers_has_one(
    family: str, added: Json, windowed: set[int]
) -> None:
    assert read(config(family) | added).windowed == windowed


def gguf_spec(path: Path, added: dict[str, w.Value]) -> ModelSpec:
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    path.write_bytes(w.gguf_bytes(metadata | added, tensors))
    return read_gguf_spec(open_gguf(path))


@pytest.mark.parametrize(
    "added",
    [
        {"pooling_type": 0},
        {"pooling_type": 3, "tensor_data_layout": "Meta AI original pth"},
        {"attention.sliding_window": 1 << 20, "nextn_predict_layers": 0},
        {"residual_scale": 1.0, "attention.max_alibi_bias": 0.0, "rope.dimension_sections": [0, 0]},
    ],
)
def test_a_key_of_gguf_that_says_nothing(tmp_path: Path, added: dict[str, w.Value]) -> None:
    path = tmp_path / "m.gguf"
    assert gguf_spec(path, {f"llama.{k}": v for k, v in added.items()}) == gguf_spec(path, {})
