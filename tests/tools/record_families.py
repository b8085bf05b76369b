"""Records a tiny random model of every family: Hugging Face folders, and what Transformers computes.

Run by hand in the `transformers` peer (see bench/peers/setup.sh).
Owns every folder `tests/goldens/families/*`; the tests only read them, without torch or transformers.

Goldens are computed in fp32 with plain ("eager") attention from the weights as they were stored.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import record_tiny as tiny
import torch
import transformers as hf

tiny.STEPS = 24
tiny.MIN_GAP = 0.004  # ten times what fp32 sums in another order make of logits like these
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    """One model: its configuration class, what differs from `COMMON`, the type of its weights."""

    name: str
    config: type[hf.PreTrainedConfig]
    settings: dict[str, Any]
    dtype: str = "BF16"
    common: dict[str, Any] = field(default_factory=lambda: LLAMA)
    shard: str = "1GB"


ALL = {
    "vocab_size": tiny.VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA = ALL | {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    """Rotary parameters as Transformers 5 writes them."""
    return {"rope_type": kind, "rope_theta": 10_000.0} | more


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
SHORT, LONG = [1.0, 1.1, 1.4, 2.0], [1.5, 2.5, 6.0, 20.0]
LONGROPE = rope("longrope", short_factor=SHORT, long_factor=LONG)
GEMMA3_ROPE = {
    "full_attention": rope("linear", rope_theta=1e6, factor=8.0),
    "sliding_attention": rope(),
}
CASES = [
    Case("llama3", hf.LlamaConfig, {"rope_parameters": LLAMA3}, "F32", shard="40KB"),
    Case(
        "mistral",
        hf.MistralConfig,
        {"sliding_window": 8, "tie_word_embeddings": False, "rope_parameters": rope()},
    ),
    Case(
        "qwen2",
        hf.Qwen2Config,
        {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=128)},
    ),
    Case("qwen3", hf.Qwen3Config, {"rope_parameters": rope("linear", factor=2.0), "head_dim": 16}),
    Case(
        "phi3",
        hf.Phi3Config,
        {
            "sliding_window": 12,
            "tie_word_embeddings": False,
            "rope_parameters": rope(partial_rotary_factor=0.75),
            "original_max_position_embeddings": 512,
        },
    ),
    Case(
        "gemma2",
        hf.Gemma2Config,
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "rope_parameters": rope(),
        },
    ),
    Case(
        "gemma3",
        hf.Gemma3TextConfig,
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "rope_parameters": GEMMA3_ROPE,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Case(
        "mixtral",
        hf.MixtralConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": rope(),
        },
    ),
    Case(
        "qwen3_moe",
        hf.Qwen3MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "rope_parameters": rope(),
        },
    ),
    Case("smollm3", hf.SmolLM3Config, {"no_rope_layers": [1, 0], "rope_parameters": rope()}),
    Case(
        "granite",
        hf.GraniteConfig,
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
            "rope_parameters": rope(),
        },
    ),
    Case(
        "granitemoehybrid",
        hf.GraniteMoeHybridConfig,
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.25,
            "logits_scaling": 2,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["full_attention"] * 2,
            "mamba_n_heads": 8,
            "position_embedding_type": "rope",
            "rope_parameters": rope(),
        },
    ),
    Case("olmo2", hf.Olmo2Config, {"tie_word_embeddings": False, "rope_parameters": rope()}),
    Case(
        "olmo3",
        hf.Olmo3Config,
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=64),
                "sliding_attention": rope(),
            },
        },
    ),
    Case(
        "phi3_long",
        hf.Phi3Config,
        {
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 8,
            "rope_parameters": LONGROPE,
        },
    ),
    Case(
        "phi4_mini",
        hf.Phi3Config,
        {  # loaded for 512 tokens it takes the short factors
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "rope_parameters": LONGROPE
            | {
                "partial_rotary_factor": 0.75,
                "short_factor": SHORT[:3],
                "long_factor": LONG[:3],
            },
        },
    ),
    Case("glm", hf.GlmConfig, {"rope_parameters": rope(partial_rotary_factor=0.5)}),
    Case(
        "glm4", hf.Glm4Config, {"head_dim": 16, "rope_parameters": rope(partial_rotary_factor=0.5)}
    ),
    Case("starcoder2", hf.Starcoder2Config, {"sliding_window": 12, "rope_parameters": rope()}),
    Case(
        "gpt_oss",
        hf.GptOssConfig,
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": rope(
                "yarn",
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        },
    ),
    Case(
        "llama4_text",
        hf.Llama4TextConfig,
        {
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "floor_scale": 4,
            "attn_scale": 0.3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "rope_parameters": rope(),
        },
    ),
    Case(
        "deepseek_v2",
        hf.DeepseekV2Config,
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        },
    ),
    Case(
        "gpt2",
        hf.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
        common=ALL,
    ),
    Case(
        "opt",
        hf.OPTConfig,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 32,
        },
        "F16",
        common=ALL,
    ),
    Case(
        "bloom",
        hf.BloomConfig,
        {
            "hidden_size": 48,
            "n_layer": 2,
            "n_head": 6,
            "tie_word_embeddings": False,
        },
        common=ALL,
    ),
]


# Large, and the embedding small: else a tied head answers each token with itself.
LAST_NORM = (
    "model.norm.weight",
    "transformer.ln_f.weight",
    "model.decoder.final_layer_norm.weight",
)


def build(case: Case, seed: int) -> torch.nn.Module:
    """Random weights, wide enough that logits are far from flat and every norm and bias matters; rounded to
    the type of the file."""
    config = case.config(**(case.common | case.settings))
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    draw = torch.Generator().manual_seed(seed)
    gemma = case.name.startswith("gemma")  # norms are stored less 1, and the embedding is scaled up
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if name.endswith("bias"):
                noise *= 0.2
            elif weight.dim() == 1:
                middle = 8.0 if name in LAST_NORM else 0.0 if gemma else 1.0
                noise = middle - 0.5 + torch.rand(weight.shape, generator=draw)
            elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                noise *= 0.05
            else:
                noise *= tiny.GAIN / weight.shape[-1] ** 0.5
            weight.copy_(noise.to(DTYPES[case.dtype]))
    return model


@torch.no_grad()
def promising(model: torch.nn.Module, prompt: list[int]) -> bool:
    """Whether the greedy path is varied and leaves no doubt; gives up at the first that it leaves."""
    tokens = list(prompt)
    for _ in range(tiny.STEPS):
        best = torch.topk(model(torch.tensor([tokens])).logits[0, -1], 2)
        if best.values[0] - best.values[1] <= tiny.MIN_GAP:
            return False
        tokens.append(int(best.indices[0]))
        if len(tokens) == len(prompt) + 8 and len(set(tokens[-8:])) < 5:
            return False
    return len(set(tokens[len(prompt) :])) >= tiny.STEPS // 2


def find(
    case: Case, prompts: list[list[int]]
) -> tuple[torch.nn.Module, dict[str, np.ndarray], int]:
    """The first seed whose greedy paths are varied, differ, and leave no doubt."""
    for seed in range(3000):
        model = build(case, seed)
        if all(promising(model, prompt) for prompt in prompts):
            golden = tiny.record(model, prompts)
            if golden["greedy_0"][-8:].tolist() != golden["greedy_1"][-8:].tolist():
                return model, golden, seed
    raise RuntimeError(f"{case.name}: no seed gives an unambiguous path")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "goldens" / "families"
    )
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = tiny.build_tokenizer()
    prompts = [tokenizer.encode(text).ids for text in tiny.PROMPTS[1:]]
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        model, golden, seed = find(case, prompts)
        folder = arguments.out / case.name
        shutil.rmtree(folder, ignore_errors=True)
        model.to(DTYPES[case.dtype]).save_pretrained(folder, max_shard_size=case.shard)
        golden["logits_1"] = golden["logits_1"][-8:]  # of the longer prompt the end is enough
        np.savez_compressed(folder / "golden.npz", **golden)
        tiny.describe(case.name, seed, golden | {"logits_2": golden["logits_1"]})


if __name__ == "__main__":
    main()
