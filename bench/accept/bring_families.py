"""Families that are small steps from others, as tiny models with new random weights: logits beside Transformers,
bits in a crowd, the same model as GGUF, and the plan.

`--families-python` (or PAGETURNER_FAMILIES_PYTHON) is a Python with torch, transformers, tokenizers and gguf.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np
from harness import ROOT, Line, NotRun
from test_gguf_newer import CASES, converted

from pageturner.kernels.cpu.native import NativeOps
from pageturner.lab.planning.model_outline import read_outline
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from support.decoding import Decoding

TESTS = ROOT / "tests"
NAMES = [
    "qwen2_moe",
    "seed_oss",
    "exaone4",
    "cohere2",
    "olmoe",
    "gemma",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2_groups",
    "minimax_m2",
    "ministral",
    "ministral3",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "arcee",
    "glm4_moe_lite",
    "stablelm",
    "stablelm_parallel",
    "stablelm_norms",
    "phi",
    "internlm3",
]
BOUND = 1e-4  # of the largest logit
SEED = 20_261
REFERENCE = """
import sys
from pathlib import Path
import numpy as np, torch, transformers as hf
from record_families import build
source, target, seed, *names = sys.argv[1:]
for name in names:
    config = hf.AutoConfig.from_pretrained(Path(source) / name)
    model = build(config, int(seed))
    model.save_pretrained(Path(target) / name)
    draw = np.random.default_rng(int(seed))
    prompts = [draw.integers(3, 320, n) for n in (16, 300)]
    with torch.no_grad():
        logits = [model(torch.tensor([p.tolist()])).logits[0].numpy() for p in prompts]
    np.savez(Path(target) / name / "truth.npz", *prompts, *logits)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PAGETURNER_FAMILIES_PYTHON", "")
    parser.add_argument("--families-python", default=default)
    parser.add_argument("--families-names", nargs="*", default=NAMES, choices=NAMES)


def crowd_is_equal(model: Decoder, ops: NativeOps, prompts: list[list[int]]) -> bool:
    """Whether three sequences together, in pieces of 37 tokens, have the bits that each has alone."""
    sequences = {"a": prompts[0], "b": prompts[1], "c": prompts[1][::-1]}
    alone = {
        name: Decoding(model, ops).step([(name, tokens)])[0] for name, tokens in sequences.items()
    }
    crowd, got = Decoding(model, ops, block_size=5, blocks=300), {name: [] for name in sequences}
    for start in range(0, 300, 37):
        parts = [(name, tokens[start : start + 37]) for name, tokens in sequences.items()]
        parts = [(name, part) for name, part in parts if part]
        for (name, _), logits in zip(parts, crowd.step(parts), strict=True):
            got[name].append(logits)
    return all(np.array_equal(np.concatenate(got[name]), alone[name]) for name in sequences)


def gguf_error(folder: Path, ops: NativeOps, prompt: list[int], expected: np.ndarray) -> float:
    """The largest difference of the logits of the same model as llama.cpp's converter writes it."""
    arch, settings = CASES[folder.name]
    path = folder / "model.gguf"
    path.write_bytes(converted(folder, arch, settings, {}))
    model = load_model(path, ops, dtype="float32")
    found = Decoding(model, ops).step([("p", prompt)])[0]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def family_line(folder: Path) -> Line:
    """The row of one family."""
    truth, ops = np.load(folder / "truth.npz"), NativeOps(threads=2)
    prompts = [truth[f"arr_{i}"].tolist() for i in range(2)]
    expected = [truth[f"arr_{i}"] for i in (2, 3)]
    model = load_model(folder, ops, dtype="float32")
    error = 0.0
    for prompt, wanted in zip(prompts, expected, strict=True):
        found = Decoding(model, ops).step([("p", prompt)])[0]
        error = max(error, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    equal = crowd_is_equal(model, ops, prompts)
    planned = read_outline(folder).weights is not None
    gguf = None
    if folder.name in CASES:
        gguf = gguf_error(folder, ops, prompts[0], expected[0])
    said = "llama.cpp has no name for it" if gguf is None else f"{gguf:.1e}"
    figure = f"logits {error:.1e}; bits in a crowd {'equal' if equal else 'DIFFER'}; GGUF {said}; "
    figure += f"planned {planned}; {model.spec.composed or 'every backend'}"
    passed = error < BOUND and equal and (gguf or 0.0) < BOUND and planned
    return Line(f"{folder.name}: Transformers within {BOUND}", figure, passed)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    names = (TESTS / "models" / "test_other_names.py", TESTS / "models" / "test_families.py")
    yield harness.pytest_line("InternLM 2, Baichuan, ChatGLM, Mistral 3; goldens", *map(str, names))
    if not options.families_python:
        raise NotRun("--families-python names no Python with transformers")
    with tempfile.TemporaryDirectory() as made:
        command = [options.families_python, "-c", REFERENCE, str(TESTS / "goldens" / "families")]
        environment = {**os.environ, "PYTHONPATH": str(TESTS / "tools")}
        command += [made, str(SEED), *options.families_names]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        for name in options.families_names:
            yield from harness.safely(
                name, lambda name=name: iter([family_line(Path(made) / name)])
            )


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
