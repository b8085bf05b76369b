"""Records LoRA adapters of the tiny models of every family, and what Transformers with PEFT computes.

Run by hand in an environment with torch 2.13, transformers 5.23 and peft 0.21.
Owns every folder `tests/goldens/adapters/*`; the tests only read them, without these packages.

Goldens are computed in fp32 with plain ("eager") attention from the weights as they were stored.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

GOLDENS = Path(__file__).parents[1] / "goldens"
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    """An adapter: its folder, the family it is for, its settings, the type of its values."""

    name: str
    family: str
    targets: list[str]
    kind: str = "F32"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("llama3", "llama3", LLAMA, settings={"r": 8, "lora_alpha": 16}),
    Case(
        "llama3_head", "llama3", ["q_proj", "v_proj", "lm_head"], settings={"r": 3, "lora_alpha": 7}
    ),
    Case(
        "mistral",
        "mistral",
        [*LLAMA, "embed_tokens", "lm_head"],
        "F32",
        {"r": 6, "lora_alpha": 12, "use_rslora": True},
    ),
    Case(
        "qwen2",
        "qwen2",
        LLAMA,
        "BF16",
        {
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"down_proj": 7, r"layers\.1\.self_attn\.q_proj": 17},
            "alpha_pattern": {"model.layers.0.mlp.up_proj": 3.5},
        },
    ),
    Case("qwen3", "qwen3", ["q_proj", "o_proj"], "F16", {"r": 40, "lora_alpha": 20}),
    Case("phi3", "phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "F32", {"r": 5}),
    Case("gemma2", "gemma2", [*LLAMA, "embed_tokens"], "F32", {"r": 4}),
    Case("gemma3", "gemma3", LLAMA, "BF16", {"r": 4, "layers_to_transform": [1]}),
    Case("mixtral", "mixtral", ["q_proj", "v_proj", "o_proj"], "F32", {"r": 4}),
    Case(
        "gpt2", "gpt2", ["c_attn", "c_proj", "c_fc", "wte"], "F32", {"r": 4, "fan_in_fan_out": True}
    ),
    Case(
        "opt",
        "opt",
        ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "embed_tokens"],
        "F16",
        {"r": 4},
    ),
    Case(
        "bloom",
        "bloom",
        ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        "F32",
        {"r": 4},
    ),
]


def base_of(case: Case) -> hf.PreTrainedModel:
    """The tiny model in fp32."""
    folder = GOLDENS / "families" / case.family
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write(case: Case, folder: Path) -> None:
    """An adapter of random values that change every logit, saved by PEFT."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=case.targets, **case.settings)
    model = get_peft_model(base_of(case), config)
    draw = torch.Generator().manual_seed(sum(case.name.encode()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(weight.shape, generator=draw)
                embedding = "embedding" in name
                size = 0.4 if "lora_A" in name else 0.05 if embedding or "lm_head" in name else 0.4
                weight.copy_((noise * size / min(weight.shape) ** 0.5).to(DTYPES[case.kind]))
                weight.data = weight.data.to(DTYPES[case.kind])
    model.peft_config["default"].base_model_name_or_path = f"tiny/{case.family}"
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def record(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Logits behind each token of two prompts, by the adapter as it was saved."""
    model = (
        PeftModel.from_pretrained(base_of(case), folder, autocast_adapter_dtype=False)
        .eval()
        .float()
    )
    truth = np.load(GOLDENS / "families" / case.family / "golden.npz")
    plain = base_of(case)
    found = {}
    for i in range(2):
        prompt = truth[f"prompt_{i}"]
        tokens = torch.tensor([prompt.tolist()])
        logits = model(tokens).logits[0].float()
        moved = (logits - plain(tokens).logits[0]).abs().max().item()
        print(f"{case.name} prompt {i}: the adapter moves logits by up to {moved:.3f}")
        found |= {f"prompt_{i}": prompt, f"logits_{i}": logits.numpy()[-8:]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=GOLDENS / "adapters")
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        folder = arguments.out / case.name
        shutil.rmtree(folder, ignore_errors=True)
        write(case, folder)
        np.savez_compressed(folder / "golden.npz", **record(case, folder))


if __name__ == "__main__":
    main()
