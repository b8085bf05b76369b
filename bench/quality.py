"""What rounding costs: KL divergence, same top token and perplexity of one text against the model in fp32.

    python bench/quality.py --model MODEL.gguf --text TEXT [--tokens 448]

One row per way of loading: the integers of the file with 8, auto and 15 bits of activations, and the fp32
weights made into int8 and int4. "fp32" is the file dequantised: what its own bits once cost is not seen here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from pageturner.files.tokenizer import load_tokenizer
from pageturner.kernels.base import Batch
from pageturner.kernels.native import NativeOps
from pageturner.models.load import load_model

WAYS = {
    "fp32": {"dtype": "float32"},
    "file, 8 bits": {"activation_bits": "8"},
    "file, auto": {"activation_bits": "auto"},
    "file, 15 bits": {"activation_bits": "15"},
    "int8, auto": {"dtype": "float32", "quantization": "int8"},
    "int4, auto": {"dtype": "float32", "quantization": "int4"},
}
BLOCK = 16


def logprobs(ops: NativeOps, model: Path, tokens: np.ndarray, way: dict[str, str]) -> np.ndarray:
    """Log probabilities [T, V] after each token, from one prefill."""
    decoder = load_model(model, ops, max_positions=len(tokens), **way)
    blocks = -(-len(tokens) // BLOCK)
    kv = ops.alloc_kv(decoder.kv_spec(blocks, BLOCK, "float32"))
    rows = np.arange(len(tokens), dtype=np.int32)
    ends = np.array([0, len(tokens)], np.int32)
    table = np.arange(blocks, dtype=np.int32)[None]
    x = decoder.forward(Batch(tokens, rows, ends, ends[1:], table, rows, rows), kv).copy()
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=448)
    arguments = parser.parse_args()
    tokenizer, ops = load_tokenizer(arguments.model), NativeOps()
    ids = tokenizer.encode(arguments.text.read_text(), add_special=True, parse_special=False)
    tokens = np.array(ids[: arguments.tokens], np.int32)
    base = np.empty((0, 0), np.float32)
    print("| weights, activations | KL | same top token | perplexity |\n|--|--|--|--|")
    for name, way in WAYS.items():
        mine = logprobs(ops, arguments.model, tokens, way)
        base = base if base.size else mine
        kl = (np.exp(base) * (base - mine)).sum(axis=1, dtype=np.float64).mean()
        same = (base.argmax(axis=1) == mine.argmax(axis=1)).mean()
        perplexity = np.exp(-mine[np.arange(len(tokens) - 1), tokens[1:]].mean(dtype=np.float64))
        print(f"| {name} | {kl:.5f} | {same:.1%} | {perplexity:.2f} |", flush=True)


if __name__ == "__main__":
    main()
