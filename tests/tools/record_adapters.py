"""Records LoRA adapters of the tiny models of every family, and what Transformers with PEFT computes.

Run by hand in an environment with torch 2.13, transformers 5.23 and peft 0.21.
Owns every folder `tests/goldens/adapters/*`; the tests only read them, without these packages. What is
recorded anew is the adapter that a folder describes: its settings, the model it is for, the type of its values.

Goldens are computed in fp32 with plain ("eager") attention from the weights as they were stored.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import record_families as families
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

GOLDENS = Path(__file__).parents[1] / "goldens"


def base_of(folder: Path) -> tuple[hf.PreTrainedModel, Path]:
    """The tiny model that an adapter is for, in fp32, and its folder."""
    config = LoraConfig.from_pretrained(folder)
    family = GOLDENS / "families" / config.base_model_name_or_path.removeprefix("tiny/")
    model = hf.AutoModelForCausalLM.from_pretrained(
        family, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), family


def write(folder: Path) -> None:
    """An adapter of random values that change every logit, saved by PEFT."""
    config = LoraConfig.from_pretrained(folder)
    config.inference_mode = False
    dtype = next(iter(load_file(folder / "adapter_model.safetensors").values())).dtype
    model = get_peft_model(base_of(folder)[0], config)
    draw = torch.Generator().manual_seed(sum(folder.name.encode()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(weight.shape, generator=draw)
                small = "lora_A" not in name and ("embedding" in name or "lm_head" in name)
                size = 0.05 if small else 0.4
                weight.copy_((noise * size / min(weight.shape) ** 0.5).to(dtype))
                weight.data = weight.data.to(dtype)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def record(folder: Path) -> dict[str, np.ndarray]:
    """Logits behind each token of two prompts, by the adapter as it was saved."""
    plain, family = base_of(folder)
    model = PeftModel.from_pretrained(base_of(folder)[0], folder, autocast_adapter_dtype=False)
    model = model.eval().float()
    truth = np.load(family / "golden.npz")
    found = {}
    for i in range(2):
        prompt = truth[f"prompt_{i}"]
        tokens = torch.tensor([prompt.tolist()])
        logits = model(tokens).logits[0].float()
        moved = (logits - plain(tokens).logits[0]).abs().max().item()
        print(f"{folder.name} prompt {i}: the adapter moves logits by up to {moved:.3f}")
        found |= {f"prompt_{i}": prompt, f"logits_{i}": logits.numpy()[-8:]}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder in families.folders("adapters"):
        write(folder)
        np.savez_compressed(folder / "golden.npz", **record(folder))
