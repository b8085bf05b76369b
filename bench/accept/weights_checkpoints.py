"""Quantised checkpoints and KV types: what each becomes, what it costs, and what lies are told from.

Owns the figures of its lines. Folders that the libraries themselves made are in tests/goldens/checkpoints. A
larger one, of random integers, is made here for memory and time of loading. Speeds are taken in turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

HERE = Path(__file__).parent
sys.path += [
    str(HERE),
    str(HERE.parent),
    str(HERE.parents[1] / "tests"),
    str(HERE.parents[1] / "tests/kernels"),
]

import grid  # noqa: E402
from harness import Line  # noqa: E402

import quality  # noqa: E402
from pageturner.formats import hub  # noqa: E402
from pageturner.kernels.base import KV_TYPES, AttentionShape  # noqa: E402
from pageturner.kernels.cpu.native import NativeOps  # noqa: E402
from pageturner.models.load import load_model  # noqa: E402
from support.safetensors_writer import write_safetensors  # noqa: E402

EXACT, SERVED, ROUNDED = 2e-6, 0.012, 0.025  # of logits: relative error, root mean square
HEAVIER = 1.15  # times the packed weights is the memory that loading takes at most
KV_KL = 0.01  # nats, of fp8: what KV may cost


def root_mean_square(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2)) / np.sqrt(np.mean(expected**2)))


# -- kernels -------------------------------------------------------------------------------------------------


def in_turns(tasks: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Seconds of one call of each, the median over rounds of the least in a round."""
    best: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                task()
                times.append(time.perf_counter() - begin)
            best[name].append(min(times))
    return {name: statistics.median(times) for name, times in best.items()}


# -- loading -------------------------------------------------------------------------------------------------
def random_gptq(folder: Path, dim: int, inner: int, layers: int) -> None:
    """A Llama of random integers, 4 bits in groups of 128."""
    draw, group = np.random.default_rng(1), 128
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def floats(name: str, *shape: int) -> None:
        values = draw.standard_normal(shape, dtype=np.float32) * 0.02
        tensors[name] = ("F16", shape, values.astype(np.float16).tobytes())

    floats("model.embed_tokens.weight", 1024, dim)
    floats("model.norm.weight", dim)
    for i in range(layers):
        prefix = f"model.layers.{i}."
        floats(prefix + "input_layernorm.weight", dim)
        floats(prefix + "post_attention_layernorm.weight", dim)
        for name, rows, columns in [
            *((f"self_attn.{p}_proj", dim, dim) for p in "qkvo"),
            ("mlp.gate_proj", inner, dim),
            ("mlp.up_proj", inner, dim),
            ("mlp.down_proj", dim, inner),
        ]:
            groups, name = columns // group, prefix + name
            scale = draw.uniform(1e-3, 2e-3, (groups, rows)).astype(np.float16)
            tensors[name + ".qweight"] = (
                "I32",
                (columns // 8, rows),
                draw.bytes(columns * rows // 2),
            )
            tensors[name + ".qzeros"] = ("I32", (groups, rows // 8), b"\x77" * (groups * rows // 2))
            tensors[name + ".scales"] = ("F16", (groups, rows), scale.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // 64,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "sym": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def loaded(folder: str) -> None:
    """What a process of its own says of one load: JSON."""

    def own() -> int:  # pages of the file are not memory of the process
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["RssAnon"].split()[0]) * 1024

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(own())

    before, seen, done = own(), [0], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    decoder = load_model(folder, NativeOps(2))
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    packed = sum(size.nbytes for size in decoder.sizes.values())
    print(json.dumps({"seconds": seconds, "packed": packed, "peak": max(seen) - before}))


def load_lines() -> Iterator[Line]:
    with TemporaryDirectory() as folder:
        random_gptq(Path(folder), 2048, 5632, 8)
        size = (Path(folder) / "model.safetensors").stat().st_size
        done = subprocess.run(
            [sys.executable, __file__, "--loaded", folder],
            capture_output=True,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout)
    own = found["peak"]
    figure = (
        f"{own / 1e6:.0f} MB at the peak for {found['packed'] / 1e6:.0f} MB packed,"
        f" {own / found['packed']:.2f} times; {size / 1e6:.0f} MB of file in {found['seconds']:.1f} s,"
        f" {size / found['seconds'] / 1e6:.0f} MB/s"
    )
    what = f"loading a GPTQ folder takes at most {HEAVIER} times the packed weights"
    yield Line(what, figure, own < HEAVIER * found["packed"])


# -- KV ------------------------------------------------------------------------------------------------------
def kv_quality_lines(text: Path, tokens: int) -> Iterator[Line]:
    model = hub.resolve("smollm2").path
    windows = quality.read_windows(model, text, tokens)
    with TemporaryDirectory() as folder:
        base = quality.keep(Path(folder), quality.logits_of(model, dict(quality.EXACT), windows))
        for kv in KV_TYPES:
            way = {"dtype": "float32", "kv": kv}
            if kv == "float32":
                continue
            loss = quality.loss(base, quality.logits_of(model, way, windows), windows)
            figure = (
                f"KL {loss.kl:.5f}, same top token {loss.same:.1%}, perplexity {loss.change:+.2%}"
            )
            good = loss.kl < KV_KL if kv in ("bfloat16", "fp8_e4m3") else None
            yield Line(f"SmolLM2 in fp32 with KV in {kv}, {loss.tokens} tokens", figure, good)


def kv_speed_lines() -> Iterator[Line]:
    """Decode of 32 sequences of 1,000 tokens, heads of SmolLM2; and one prompt of 512."""
    ops, shape = NativeOps(2), AttentionShape(9, 3, 64, 64**-0.5)
    for what, runs in {
        "decode of 32 sequences of 1,000 tokens": [(1000, 1)] * 32,
        "a prompt of 512 tokens": [(0, 512)],
    }.items():
        blocks = sum(-(-(done + n) // 16) for done, n in runs) + 1
        batch, whole = grid.batch(runs, 16, blocks), grid.batch(grid.history(runs), 16, blocks)
        q, storage = grid.normal(len(batch.positions), 9 * 64), {}
        for kv in KV_TYPES:
            storage[kv] = ops.alloc_kv(grid.kv_spec(16, blocks, 3, 64, kv))
            grid.fill_kv(ops, storage[kv], whole, 3 * 64)
        tasks = {
            kv: (lambda memory=memory, q=q, batch=batch: ops.attention(q, memory, 0, batch, shape))
            for kv, memory in storage.items()
        }
        exact = tasks["float32"]()
        seconds = in_turns(tasks, rounds=7, repeats=9)
        for kv in ("bfloat16", "fp8_e4m3", "int8", "float32"):
            error = root_mean_square(np.asarray(tasks[kv]()), np.asarray(exact))
            figure = f"{seconds[kv] * 1e6:.0f} us, {seconds[kv] / seconds['float16']:.2f} of float16's; error"
            yield Line(
                f"attention, KV in {kv}, {what}", f"{figure} {error:.1e} (Gaussian K and V)", None
            )


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of checkpoints and KV types."""
    logging.getLogger("pageturner").setLevel(logging.ERROR)  # what weights become is in the lines
    yield from load_lines()
    yield from kv_quality_lines(arguments.kv_text, arguments.kv_tokens)
    if not arguments.no_speed:
        yield from kv_speed_lines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    text = HERE.parents[1] / "docs" / "architecture.md"
    parser.add_argument(
        "--kv-text", type=Path, default=text, help="text on which KV types are compared"
    )
    parser.add_argument("--kv-tokens", type=int, default=2048, help="so many of its tokens")
    parser.add_argument("--no-speed", action="store_true", help="no times of kernels")


if __name__ == "__main__":  # a process of its own for `load_lines`
    loaded(sys.argv[-1])
