"""Hybrid models as they are published: a text part beside what sees pictures and predicts a second token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pageturner.models.hf_spec import read_hf_spec
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
OUTER: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
}


def spec_of(**changes: Any) -> Any:
    return read_hf_spec(OUTER | {"text_config": TEXT | changes}, "config.json", "m", True)


def test_a_published_configuration() -> None:
    spec = spec_of()
    assert spec.linear is not None
    assert (len(spec.linear.layers), spec.linear.value_heads, spec.linear.keys) == (48, 48, 2048)
    assert (spec.rope.dim, spec.rope.base, spec.family.attn_gate) == (64, 1e7, True)
    assert spec.kv_spec(1, 1, "float16").bytes_per_token == 16 * 4 * 256 * 2 * 2
    assert spec_of(layer_types=None).linear == spec.linear, "every fourth layer has attention"
    assert spec_of(output_gate_type="swish").linear == spec.linear
    assert spec_of(output_gate_type="sigmoid").linear.act == "sigmoid"


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (
            {"layer_types": ["mamba"] * 64},
            "model_unsupported",
            "linear_attention or full_attention",
        ),
        ({"attn_output_gate": False}, "model_unsupported", "attn_output_gate"),
        ({"output_gate_type": "tanh"}, "model_invalid", "'tanh'"),
        ({"linear_value_head_dim": 100}, "model_unsupported", "multiples of 16"),
        ({"linear_num_value_heads": 40}, "model_invalid", "40 value heads for 16"),
        ({"layer_types": ["linear_attention"] * 64}, "model_invalid", "64 of 64 layers"),
        ({"model_type": "qwen4_exp"}, "model_unsupported", "qwen4_exp"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], code: str, says: str) -> None:
    with engine_fault(says, code=code):
        spec_of(**changes)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_that_sees(tmp_path: Path, name: str) -> None:
    """Its tensors are those of `model.language_model.`; pictures and a second token are passed over."""
    text = json.loads((FAMILIES / name / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    outer = {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(FAMILIES / name / "model.safetensors")
    found = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: x
        for key, x in tensors.items()
    }
    found |= {
        "model.visual.blocks.0.attn.qkv.weight": np.zeros((3, 3), np.float32),
        "mtp.layers.0.mlp.gate.weight": np.zeros((3, 3), np.float32),
        "mtp.fc.weight": np.zeros((3, 3), np.float32),
    }
    save_file(found, tmp_path / "model.safetensors")
    prompt = np.load(FAMILIES / name / "golden.npz")["prompt_1"].tolist()
    assert np.array_equal(*(logits(path, prompt) for path in (FAMILIES / name, tmp_path)))
