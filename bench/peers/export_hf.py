"""Writes a GGUF file as a Hugging Face folder: fp32 safetensors, config, tokenizer, chat template.

Run in the `transformers` peer: `export_hf.py FILE.gguf FOLDER`; vLLM's CPU build serves the folder.
The tokenizer is Transformers' own conversion of the file, except that its pre-tokenizer is the one that the
file names (`smollm`: every digit alone), which Transformers does not know and replaces by GPT-2's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    weights = loaded.state_dict()
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # A model that was loaded from GGUF refuses to be saved: move the weights into a plain one.
    model = type(loaded)(loaded.config)
    model.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(
        f"{target}: {sum(p.numel() for p in model.parameters()):,} parameters, {model.config.model_type}"
    )


if __name__ == "__main__":
    main()
