"""LFM2, Granite 4 H, Nemotron-H and Falcon-H1 as they are published: sizes by hand, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pageturner.errors import EngineFault
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.spec import ModelSpec

Json = dict[str, Any]
LFM2: Json = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
LFM2_MOE: Json = {
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": [("conv", "full_attention")[i in (2, 6, 10, 14, 18, 21)] for i in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
GRANITE: Json = {  # 4.0-h-tiny
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "intermediate_size": 512,
    "layer_types": [("mamba", "attention")[i in (5, 15, 25, 35)] for i in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
_MAMBA: Json = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO_9B: Json = _MAMBA | {  # v2
    "attention_head_dim": 128,
    "chunk_size": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_query_groups": 8,
    "sliding_window": None,
}
NANO_30B: Json = _MAMBA | {  # Nemotron 3
    "chunk_size": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
FALCON: Json = {
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.01953125,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}


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
    with pytest.raises(EngineFault, match=says) as fault:
        read(values)
    assert fault.value.code == code
