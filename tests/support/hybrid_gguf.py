"""Keys of GGUF files of models whose layers are partly recurrent, and of mixtures of experts, as llama.cpp's
converter writes them."""

from __future__ import annotations

from pageturner.models.spec import ModelSpec
from support import gguf_writer as w


def keys_of(spec: ModelSpec) -> dict[str, w.Value]:
    """The keys of a model of Qwen3 MoE, Qwen3-Next and Qwen3.5, without the architecture's name before them."""
    keys = w.sizes_of(spec) | {
        "attention.layer_norm_rms_epsilon": spec.eps,
        "rope.dimension_count": spec.rope.dim,
        "rope.freq_base": spec.rope.base,
    }
    linear, experts = spec.linear, spec.experts
    if linear is not None:
        keys |= {
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": linear.kernel,
            "ssm.state_size": linear.key_dim,
            "ssm.group_count": linear.key_heads,
            "ssm.time_step_rank": linear.value_heads,
            "ssm.inner_size": linear.values,
            "full_attention_interval": 4,
        }
    if experts is not None:
        keys |= {
            "expert_count": experts.count,
            "expert_used_count": experts.top_k,
            "expert_feed_forward_length": experts.ffn,
            "expert_shared_feed_forward_length": experts.shared,
            "leading_dense_block_count": min(experts.layers),
        }
    return keys
