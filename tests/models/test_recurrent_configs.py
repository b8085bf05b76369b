"""LFM2, Granite 4 H, Nemotron-H and Falcon-H1 as they are published: sizes by hand, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.spec import ModelSpec
from support.hf_folder import GOLDENS
from support.refusals import engine_fault

Json = dict[str, Any]
CONFIGS: dict[str, Json] = json.loads((GOLDENS / "hybrid_configs.json").read_bytes())
LFM2 = CONFIGS["LFM2"]
LFM2_MOE = CONFIGS["LFM2_MOE"]
GRANITE = CONFIGS["GRANITE"]
NANO_9B = CONFIGS["NANO_9B"]
NANO_30B = CONFIGS["NANO_30B"]
FALCON = CONFIGS["FALCON"]


def read(values: Json) -> ModelSpec:
    return read_hf_spec(values, "config.json", "m", "tie_word_embeddings" in values)


def mamba_state(layers: int, heads: int, size: int, state: int, groups: int) -> int:
    """Bytes of a state in fp32, and of three rows of the convolution in fp16."""
    return layers * (heads * size * state * 4 + 3 * (heads * size + 2 * groups * state) * 2)


# configuration, its recurrent layers, bytes of KV of a token in fp16, bytes of a state
SIZES = {
    "LFM2-1.2B": (LFM2, 10, 6 * 8 * 64 * 4, 10 * 2 * 2048 * 2),
    "LFM2-8B-A1B": (LFM2_MOE, 18, 6 * 8 * 64 * 4, 18 * 2 * 2048 * 2),
    "Granite 4 H Tiny": (GRANITE, 36, 4 * 4 * 128 * 4, mamba_state(36, 48, 64, 128, 1)),
    "Nemotron Nano 9B v2": (NANO_9B, 27, 4 * 8 * 128 * 4, mamba_state(27, 128, 80, 128, 8)),
    "Nemotron 3 Nano": (NANO_30B, 23, 6 * 2 * 128 * 4, mamba_state(23, 64, 64, 128, 8)),
    "Falcon-H1 of 24 layers": (FALCON, 24, 24 * 2 * 128 * 4, mamba_state(24, 48, 64, 256, 1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_by_hand(name: str) -> None:
    values, layers, token, state = SIZES[name]
    spec = read(values)
    assert spec.linear is not None
    assert len(spec.linear.layers) == layers
    assert spec.kv_spec(1, 1, "float16").bytes_per_token == token
    assert spec.linear.storage("float16").state_bytes == state


def test_what_the_keys_say() -> None:
    spec = read(LFM2)
    assert (spec.ffn, spec.tied, spec.rope.base) == (8192, True, 1e6)
    experts = read(LFM2_MOE).experts
    assert experts is not None
    assert (experts.layers, experts.scoring) == (frozenset(range(2, 24)), "sigmoid")
    assert (experts.biased, experts.extra) == (True, 1e-6)
    granite = read(GRANITE)
    assert granite.experts is not None
    assert (granite.experts.scale, granite.experts.shared) == (0.22, 1024)
    assert granite.no_rope == frozenset(range(40))
    nano = read(NANO_30B)
    assert nano.experts is not None
    assert nano.feeds == nano.experts.layers
    assert (len(nano.feeds), nano.kv_layers, nano.experts.scale) == (23, 6, 2.5)
    falcon = read(FALCON)
    assert falcon.linear is not None
    assert falcon.linear.factors[0] == 1.25 * 0.3535533905932738
    assert falcon.mixer_factors == (0.9375, 0.23570226039551587)
    assert falcon.attention_scale == 128**-0.5 * 0.39062499999999994


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        (LFM2 | {"conv_bias": True}, "model_unsupported", "conv_bias"),
        (LFM2 | {"full_attn_idxs": None}, "model_unsupported", "a list of conv"),
        (LFM2 | {"conv_L_cache": 64}, "model_unsupported", "64 positions"),
        (LFM2_MOE | {"use_expert_bias": False}, "model_unsupported", "use_expert_bias"),
        (LFM2_MOE | {"layer_types": ["conv"] * 24}, "model_invalid", "24 of 24 layers"),
        (GRANITE | {"mamba_proj_bias": True}, "model_unsupported", "mamba_proj_bias"),
        (GRANITE | {"mamba_n_heads": 40}, "model_invalid", "the 3072 columns"),
        (GRANITE | {"mamba_n_groups": 7}, "model_invalid", "48 value heads for 7"),
        (GRANITE | {"time_step_limit": [1]}, "config_invalid", "time_step_limit"),
        (GRANITE | {"time_step_limit": [2.0, 1.0]}, "model_invalid", "time steps of 2.0 to 1.0"),
        (NANO_30B | {"n_group": 4}, "model_unsupported", "n_group"),
        (NANO_30B | {"moe_latent_size": 1024}, "model_unsupported", "moe_latent_size"),
        (NANO_30B | {"mlp_hidden_act": "silu"}, "model_unsupported", "mlp_hidden_act"),
        (NANO_9B | {"hybrid_override_pattern": "MXM*"}, "model_unsupported", "layer_types"),
        (NANO_9B | {"hybrid_override_pattern": "M-M-"}, "model_invalid", "2 of 4 layers"),
        (NANO_9B | {"use_bias": True}, "model_unsupported", "use_bias"),
        (FALCON | {"projectors_bias": True}, "model_unsupported", "projectors_bias"),
        (FALCON | {"ssm_multipliers": [1.0]}, "config_invalid", "5 numbers"),
        (FALCON | {"ssm_in_multiplier": 0.0}, "model_invalid", "multipliers"),
        (FALCON | {"mamba_d_head": 32}, "model_invalid", "the 3072 columns"),
    ],
)
def test_what_is_not_computed_is_refused(values: Json, code: str, says: str) -> None:
    with engine_fault(says, code=code):
        read(values)
