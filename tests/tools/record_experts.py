"""Records tiny random mixtures of experts as GGUF files, and what Transformers computes with them.

Run by hand in the `transformers` peer (see bench/peers/setup.sh). Owns every file `tests/goldens/experts_*`.

The files follow llama.cpp's converter: the experts of a kind are one tensor of three dimensions, Mixtral is
architecture `llama` (rows of q and k permuted), Qwen3-MoE is `qwen3moe`. Each model is written twice: as
blocks of 4 and 8 bits, and in F32 with the very values of those blocks, so that one golden serves both.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import record_families as families
import record_tiny as tiny
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind


@dataclass(frozen=True, slots=True)
class Case:
    """One model: its family as record_families knows it, with experts in every layer, and its file's
    architecture. What tiny.write_gguf wants to know of a case is here too."""

    name: str
    arch: str
    config: hf.PreTrainedConfig
    explicit_head_dim: bool = True


def config(kind: type[hf.PreTrainedConfig], **settings: object) -> hf.PreTrainedConfig:
    common = tiny.common(kv_heads=2, ffn=64, tied=True, eps=1e-6, rope_base=10_000.0)
    return kind(**(common | {"hidden_size": 32, "max_position_embeddings": 512} | settings))


CASES = [
    Case(
        "experts_mixtral",
        "llama",
        config(
            hf.MixtralConfig,
            rms_norm_eps=1e-5,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            head_dim=8,
            tie_word_embeddings=False,
        ),
    ),
    Case(
        "experts_qwen3moe",
        "qwen3moe",
        config(
            hf.Qwen3MoeConfig,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            head_dim=16,
            norm_topk_prob=True,
        ),
    ),
]


def kind_of(name: str) -> Kind:
    """Layer 0 in 4 bits, layer 1 and what is outside in 8; norms and routers stay floats, as llama.cpp
    keeps them."""
    if "norm" in name or "ffn_gate_inp" in name:
        return Kind.F32
    return Kind.Q4_1 if name.startswith("blk.0.") else Kind.Q8_0


def rounded(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """The values of the weight's blocks."""
    if kind is Kind.F32:
        return weight
    values = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind).reshape(weight.shape)
    return np.ascontiguousarray(values, np.float32)


def gguf_tensors(case: Case, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names and in its order of rows."""
    out: dict[str, np.ndarray] = {}
    for key, value in model.state_dict().items():
        weight = value.numpy()
        layer, _, part = key.removeprefix("model.layers.").partition(".")
        if part == "mlp.experts.gate_up_proj":
            gates, ups = np.split(weight, 2, axis=1)
            out[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(gates)
            out[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(ups)
        elif part == "mlp.experts.down_proj":
            out[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif part == "mlp.gate.weight":
            out[f"blk.{layer}.ffn_gate_inp.weight"] = weight
        elif key != "lm_head.weight" or not case.config.tie_word_embeddings:
            name = tiny.gguf_name(key)
            heads = tiny.permuted_heads(case, name)
            out[name] = np.ascontiguousarray(tiny.permute(weight, heads) if heads else weight)
    return out


def build(case: Case, seed: int) -> torch.nn.Module:
    """A random model whose weights are the values of its blocks. Rows are rounded each on its own, so it
    does not matter that the file has them in another order."""
    model = families.build(case.config, seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            router = key.endswith("mlp.gate.weight")
            prefix = "blk.0." if ".layers.0." in key else ""
            kind = Kind.F32 if router or "norm" in key else kind_of(prefix + "x")
            weight.copy_(torch.from_numpy(rounded(weight.numpy(), kind)))
    return model


def write_config(writer: gguf.GGUFWriter, case: Case) -> None:
    """What the converter adds for experts."""
    tiny_config(writer, case)
    experts = case.config.num_local_experts
    writer.add_expert_count(experts)
    writer.add_expert_used_count(case.config.num_experts_per_tok)
    if case.arch == "qwen3moe":
        writer.add_expert_feed_forward_length(case.config.moe_intermediate_size)


tiny_config, tiny.write_config = tiny.write_config, write_config


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    tokenizer = tiny.build_tokenizer()
    prompts = [tokenizer.encode(text).ids for text in tiny.PROMPTS[1:]]
    for case in CASES:
        model, golden, seed = families.find(partial(build, case), prompts)
        tensors = gguf_tensors(case, model)
        for name, weight in tensors.items():
            assert np.array_equal(rounded(weight, kind_of(name)), weight), name
        tiny.write_gguf(out / f"{case.name}.gguf", case, tensors, tokenizer, lambda _: Kind.F32)
        tiny.write_gguf(out / f"{case.name}_quant.gguf", case, tensors, tokenizer, kind_of)
        np.savez_compressed(out / f"{case.name}.npz", **golden)
        tiny.describe(case.name, seed, golden)


if __name__ == "__main__":
    main()
