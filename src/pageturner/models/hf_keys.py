"""Keys of config.json that need no reader: those that say nothing, and what silence says.

A key says nothing if only training and serving tools read it, if its value turns nothing on, or if
it repeats what is computed anyway. Owns the tables of these, as data. Sources: the configuration
classes of Transformers 4 and 5, and what published folders carry along. Must not know what is
computed.
"""

from __future__ import annotations

from typing import Any

from pageturner.models.tables import table

# What generate() once read from here, with every value it had by default.
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p pruned_heads
"""
# Only training, serving or the tokenizer reads these; * is any text.
_TOOLS = """
    architectures auto_map *_token_id *_token_index chunk_size_feed_forward dtype id2label
    label2id init_* *_init *_init_* *initializer* layerdrop gradient_* model_type n_ctx
    name_or_path model_max_length max_seq_len* max_sequence_length output_router_logits prefix
    problem_type *loss* pretraining_tp quantization_aware *jitter* summary_* task_specific_params
    *torch_dtype *_version use_cache cache_implementation sliding_window_pattern max_window_layers
    layer_types is_decoder tokenizer_* masked_softmax_fusion slow_but_exact attn_implementation
    use_*flash_attn* flash_attn* use_flash_attention* *_in_fp32 *_fusion skip_bias_add
    is_llama_config finetuned transformers.js_config unsloth_* base_model_*_plan use_reentrant
    neftune_* label_smoothing* use_sliding_window transformers_weights *dropout *dropout_* *_pdrop *_drop
"""
HARMLESS = f"{_GENERATION} {_TOOLS}".split()
QUANTISED = "quantization_config compression_config"  # read by models/checkpoint.py
# The numbers of a spec, each with the keys by which files of any family may say the same once more.
SAME = {
    "eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "dim": "hidden_size n_embd d_model",
    "layers": "num_hidden_layers n_layer n_layers num_layers",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads",
    "head_dim": "head_dim kv_channels attention_head_dim qk_head_dim v_head_dim",
    "ffn": "intermediate_size n_inner ffn_dim ffn_hidden_size",
    "vocab": "vocab_size padded_vocab_size",
    "context": "max_position_embeddings n_positions seq_length",
    "tied": "tie_word_embeddings",
    "soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
    "rope.base": "rope_theta rotary_base rotary_emb_base",
    "rope.dim": "rotary_dim qk_rope_head_dim",
    "rope.interleaved": "rope_interleaved rope_interleave",
    "family.qkv_bias": "attention_bias qkv_bias use_qkv_bias attn_bias add_qkv_bias",
    "family.mlp_bias": "mlp_bias use_bias bias",
    "family.layer_norm": "use_layer_norm",
    "family.act": "hidden_act hidden_activation activation_function mlp_hidden_act",
    "family.gated": "use_gated_mlp gated_mlp",
    "family.qk_norm": "use_qk_norm qk_norm qk_layernorm use_qk_layernorm qk_layer_norm",
    "experts.count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "experts.top_k": "num_experts_per_tok num_experts_per_token moe_top_k moe_topk",
    "experts.ffn": "moe_intermediate_size expert_intermediate_size",
    "experts.normalise": "norm_topk_prob moe_renormalize",
    "experts.shared": "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
}
# What all models here compute.
ALWAYS = {"scale_attn_weights": True, "is_causal": True, "use_rope": True, "causal": True}

# A row for each model type that is read:
# defaults     what Transformers takes where a file is silent, as far as it is not what most take (a
#              key that is there with null is not silent)
# keys         what it calls the keys of Llama; of several names the first that has a value counts
# expected     keys that may say this alone
# silent       keys that say nothing in it
# experts      its layers, or some, are mixtures of experts
# interleaved  its rotary pairs are neighbours
# qk_norm      the key that says whether it has norms of queries and keys, their kind, and what
#              silence says
MODEL_TYPES = table("hf_families")


def _column(name: str) -> dict[str, Any]:
    return {arch: row[name] for arch, row in MODEL_TYPES.items() if name in row}


DEFAULTS: dict[str, dict[str, Any]] = _column("defaults")
KEYS: dict[str, dict[str, str]] = _column("keys")

# Of models with a vision tower, everything outside of "text_config" that is about pictures.
PICTURES = """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    image_token_id boi_token_id eoi_token_id projector_hidden_act vision_feature_layer
    multimodal_projector_bias spatial_merge_size audio_config *soft_tokens_per_*
"""
