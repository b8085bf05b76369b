"""Families after Llama 3: logits beside Transformers', what a latent KV takes, bits in any batch, lies.

Owns the bounds. The tiny random models and what Transformers 5.23 computes with them in fp32 are those of
tests/goldens/families, recorded by tests/tools/record_families.py; nothing here needs torch. Decode feeds
every token in a step of its own, prefill all of a prompt in one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests")]

import harness  # noqa: E402
from harness import ROOT, Line  # noqa: E402

from pageturner.kernels.base import KV_TYPES, KVSpec, Ops  # noqa: E402
from pageturner.models.load import load_model  # noqa: E402
from support.decoding import Decoding, backend  # noqa: E402

FAMILIES = ROOT / "tests" / "goldens" / "families"
NEWER = {
    "smollm3": "SmolLM3",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4 dense",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi4_mini": "Phi-4-mini (longrope, short)",
    "phi3_long": "Phi-3 128k (longrope, long)",
    "glm4": "GLM-4",
    "starcoder2": "Starcoder2",
    "gpt_oss": "gpt-oss",
    "llama4_text": "Llama 4 text",
    "deepseek_v2": "DeepSeek-V2-Lite",
    "mixtral": "Mixtral (stays)",
    "qwen3_moe": "Qwen3-MoE (stays)",
}
LENGTHS = {"phi4_mini": 512}  # tokens for which a model is loaded
MOST = 1e-4  # of the largest logit, as for the families that stand
# DeepSeek-V2-Lite: layers, heads, dimensions of a head's query and value, latent and rotary key
LITE = (27, 16, 192, 128, 512, 64)


def difference(name: str, ops: Ops, one_by_one: bool) -> tuple[float, float]:
    """The greatest one from Transformers' logits, and that over the largest logit."""
    decoder = load_model(FAMILIES / name, ops, dtype="float32", max_positions=LENGTHS.get(name, 0))
    truth = dict(np.load(FAMILIES / name / "golden.npz"))
    worst = share = 0.0
    for i in range(2):
        expected, runs = truth[f"logits_{i}"], Decoding(decoder, ops)
        tokens = truth[f"prompt_{i}"].tolist()
        steps = [[token] for token in tokens] if one_by_one else [tokens]
        logits = np.concatenate([runs.step([("p", step)])[0] for step in steps])[-len(expected) :]
        off = float(np.abs(logits - expected).max())
        worst, share = max(worst, off), max(share, off / float(np.abs(expected).max()))
    return worst, share


def family_lines() -> Iterator[Line]:
    for name, title in NEWER.items():
        figures, shares = [], []
        for ops_name in ("reference", "native"):
            ops = backend(ops_name)
            for one_by_one in (False, True):
                worst, share = difference(name, ops, one_by_one)
                figures.append(f"{ops_name} {'decode' if one_by_one else 'prefill'} {worst:.1e}")
                shares.append(share)
        figure = f"{', '.join(figures)}; at most {max(shares):.1e} of the largest"
        yield Line(f"{title}: logits from Transformers, fp32", figure, max(shares) < MOST)


def latent_lines() -> Iterator[Line]:
    layers, heads, query, value, rank, rotary = LITE
    ops, blocks, block_size = backend("native"), 4, 16
    for dtype in KV_TYPES:
        latent = KVSpec(layers, blocks, block_size, 1, rank + rotary, dtype, latent=True)
        taken = ops.alloc_kv(latent).nbytes // (blocks * block_size)
        plain = layers * heads * ((query + value) * KV_TYPES[dtype] + (8 if dtype == "int8" else 0))
        figure = (
            f"{taken:,} bytes, plain KV of its {heads} heads {plain:,}: {plain / taken:.1f} times"
        )
        yield Line(f"DeepSeek-V2-Lite: KV of a token in {dtype}", figure, taken * 8 < plain)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of families. arguments.quick: without the slow tests."""
    yield from family_lines()
    yield from latent_lines()
    marks = ("-m", "not slow and not model" if arguments.quick else "not model")
    yield harness.pytest_line(
        "bits alone = in any batch, chunk, prefix, preemption, KV type: sinks, chunks, latent, no rotary",
        "tests/e2e/test_newer_families.py",
        "tests/e2e/test_windows.py",
        *marks,
    )
    yield harness.pytest_line(
        "kernels: fused = their composites, bit for bit; near the reference; any threads, blocks and chunks",
        "tests/kernels/test_native_newer.py",
        *marks,
    )
    yield harness.pytest_line(
        "the same models as GGUF files, and configurations, keys and tensors that lie",
        "tests/models/test_gguf_newer.py",
        "tests/models/test_newer_configs.py",
        *marks,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--quick", action="store_true", help="without tests that are slow")


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
