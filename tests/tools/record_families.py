"""Records a tiny random model of every family: Hugging Face folders, and what Transformers computes.

Run by hand in the `transformers` peer (see bench/peers/setup.sh).
Owns every folder `tests/goldens/families/*`; the tests only read them, without torch or transformers. What
is recorded anew is a model of the config.json in a folder, weights and type included; for a new family a folder
with such a file comes first.

Goldens are computed in fp32 with plain ("eager") attention from the weights as they were stored.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import record_tiny as tiny
import torch
import transformers as hf

tiny.STEPS = 24
tiny.MIN_GAP = 0.004  # ten times what fp32 sums in another order make of logits like these


# Large, and the embedding small: else a tied head answers each token with itself.
LAST_NORM = (
    "model.norm.weight",
    "transformer.ln_f.weight",
    "model.decoder.final_layer_norm.weight",
    "model.embedding_norm.weight",
    "model.final_layernorm.weight",
    "model.norm_f.weight",
)


def build(config: hf.PreTrainedConfig, seed: int) -> torch.nn.Module:
    """Random weights, wide enough that logits are far from flat and every norm and bias matters; rounded to
    the type of the file."""
    model = hf.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    draw = torch.Generator().manual_seed(seed)
    # Gemma's norms are stored less 1, and its embedding is scaled up.
    less_one = ("gemma", "qwen3_5", "qwen3_next")
    gemma = config.model_type.startswith(less_one) and "4" not in config.model_type
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if name.endswith("bias"):
                noise *= 0.2
            elif weight.dim() == 1:
                middle = 8.0 if name in LAST_NORM else 0.0 if gemma else 1.0
                noise = middle - 0.5 + torch.rand(weight.shape, generator=draw)
            elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                noise *= 0.5 if "per_layer" in name else 0.05
            else:
                noise *= tiny.GAIN / weight.shape[-1] ** 0.5
            weight.copy_(noise.to(config.dtype or torch.float32))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):  # of experts
                noise = 0.3 * torch.randn(buffer.shape, generator=draw)
                buffer.copy_(noise.to(config.dtype or torch.float32))
            elif name.endswith("layer_scalar"):
                noise = 0.5 + torch.rand(buffer.shape, generator=draw)
                buffer.copy_(noise.to(config.dtype or torch.float32))
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
    build_model: Callable[[int], torch.nn.Module], prompts: list[list[int]]
) -> tuple[torch.nn.Module, dict[str, np.ndarray], int]:
    """The first seed whose greedy paths are varied, differ, and leave no doubt."""
    for seed in range(3000):
        model = build_model(seed)
        if all(promising(model, prompt) for prompt in prompts):
            golden = tiny.record(model, prompts)
            if golden["greedy_0"][-8:].tolist() != golden["greedy_1"][-8:].tolist():
                golden["logits_1"] = golden["logits_1"][
                    -8:
                ]  # of the longer prompt the end is enough
                return model, golden, seed
    raise RuntimeError("no seed gives an unambiguous path")


def folders(kind: str) -> list[Path]:
    """The folders of this kind of golden that are to be recorded, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens" / kind)
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    names = arguments.names or [folder.name for folder in sorted(arguments.out.iterdir())]
    return [arguments.out / name for name in names]


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = tiny.build_tokenizer()
    prompts = [tokenizer.encode(text).ids for text in tiny.PROMPTS[1:]]
    for folder in folders("families"):
        config = hf.AutoConfig.from_pretrained(folder)
        shard = "40KB" if folder.name == "llama3" else "1GB"  # llama3: several shards
        model, golden, seed = find(partial(build, config), prompts)
        shutil.rmtree(folder)
        model.to(config.dtype).save_pretrained(folder, max_shard_size=shard)
        np.savez_compressed(folder / "golden.npz", **golden)
        tiny.describe(folder.name, seed, golden)


if __name__ == "__main__":
    main()
