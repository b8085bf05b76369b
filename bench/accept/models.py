"""`make accept NAME=models`: every model folder, every sampler, and the peers beside us.

families    tiny random models of each family against Transformers
real        the real models against Transformers on the dequantised file
tokenizers  vectors, texts, random Unicode, streams
types       each GGUF type: rows, products, quality
sampling    every parameter, streamed and not; policies and orders
commands    chat, generate, doctor, the rest of the API, open loop
bad         refusals
peers       the table of bench/peers/run.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import answers
import harness
from answers import GOLDENS
from harness import DATA, ROOT, Line, NotRun

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests"))
import numpy as np

import quality
import quality_types
from pageturner.formats import hub
from pageturner.kernels.native import NativeOps
from pageturner.models.load import load_model
from peers import launch, table
from peers.run import read
from support.decoding import Decoding

EVERY = ("-m", "model or slow or not slow")
TOKENS = 2048  # of prose, for each measurement of quality
SAME_FILE = "llama"  # the peer that runs the very file that we run


# -- families ------------------------------------------------------------------------------------------------


def families() -> Iterator[Line]:
    """Logits within 1e-4 and equal greedy tokens, for each family, native backend, fp32."""
    for folder in sorted((GOLDENS / "families").iterdir()):
        truth = np.load(folder / "golden.npz")
        ops = NativeOps()
        runs = Decoding(load_model(folder, ops, dtype="float32"), ops)
        worst, same = 0.0, True
        for i in range(2):
            prompt, expected = truth[f"prompt_{i}"].tolist(), truth[f"logits_{i}"]
            logits = runs.step([(f"logits {i}", prompt)])[0][-len(expected) :]
            worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
            tokens, _ = runs.greedy(f"greedy {i}", prompt, len(truth[f"greedy_{i}"]))
            same = same and tokens == truth[f"greedy_{i}"].tolist()
        figure = f"logits within {worst:.1e}, greedy tokens {'equal' if same else 'DIFFER'}"
        yield Line(
            f"{folder.name} equals Transformers (logits 1e-4)", figure, worst < 1e-4 and same
        )
    yield harness.pytest_line(
        "families from GGUF, configurations of real models", "tests/models", *EVERY
    )


# -- the real models -----------------------------------------------------------------------------------------

REAL = {
    "qwen2.5-coder": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma3": "gemma3-270m-q4_k_m.gguf",
}


def real() -> Iterator[Line]:
    """Transformers ran the dequantised files. SmolLM2 is in NAME=talk, `right`."""
    for name, file in REAL.items():
        path = hub.cache_folder() / file
        if not path.is_file():
            raise NotRun(f"{path} is absent: python tests/tools/fetch_models.py")
        greedy = answers.greedy(str(path), GOLDENS / f"real_{name}.npz", 2)
        for line in (greedy, *answers.served(path, TOKENS)):
            yield replace(line, what=f"{name}: {line.what}")
    what = "logits of the real models, within 1e-4"
    yield harness.pytest_line(what, "tests/models/test_real_models.py", *EVERY)


# -- tokenizers ----------------------------------------------------------------------------------------------


def tokenizers() -> Iterator[Line]:
    for what, chosen in {
        "llama.cpp's vectors, all decoders' files": "vectors",
        "10,000 random Unicode strings, plain and with special tokens": "ten_thousand",
        "all of shared/data/text": "whole_texts",
        "a stream equals decoding at once, no broken character": "stream_equals",
        "text comes back": "comes_back",
    }.items():
        yield harness.pytest_line(what, "tests/formats/test_vocabs.py", "-k", chosen, *EVERY)
    yield harness.pytest_line(
        "SmolLM2's own, tokenizer.json, SentencePiece, tiktoken ranks",
        "tests/formats/test_tokenizer.py",
        "tests/formats/test_folder.py",
        *EVERY,
    )


# -- types ---------------------------------------------------------------------------------------------------


def types() -> Iterator[Line]:
    """Each GGUF type, in files that llama-quantize makes of SmolLM2, which was Q4_1 before."""
    what = "dequantised values bit-equal to the gguf package"
    yield harness.pytest_line(what, "tests/formats/test_ggml.py", *EVERY)
    what = "integer products of real weights against fp32, every type"
    yield harness.pytest_line(what, "tests/models/test_real_kernels.py", *EVERY)
    source, text = hub.resolve("smollm2").path, DATA / "text" / "en_time_machine.txt"
    if not text.is_file():
        raise NotRun(f"{text} is absent")
    windows = quality.read_windows(source, text, TOKENS)
    folder = launch.cache_dir() / "types"
    for row in quality_types.measure(source, quality_types.TYPES, windows, folder):
        ours, bits = row.auto, row.bits
        figure = f"KL {ours.kl:.5f}, same top {ours.same:.2%}, perplexity {ours.change:+.2%}"
        figure += f"; {row.matrices} of {row.all_matrices} matrices"
        passed = ours.kl < quality_types.KL and abs(ours.change) <= quality_types.CHANGE
        what = (
            f"{row.kind}: our kernels against fp32 of the same file (KL < 0.006, perplexity 1.5 %)"
        )
        yield Line(what, figure, passed)
        figure = f"KL {bits.kl:.4f}, same top {bits.same:.1%}, perplexity {bits.change:+.2%}"
        yield Line(f"{row.kind}: the file against the source (Q4_1) in fp32", figure, None)


# -- sampling, commands, bad input ---------------------------------------------------------------------------


def sampling() -> Iterator[Line]:
    what = "every parameter: streamed equals not streamed"
    yield harness.pytest_line(f"{what}, library", "tests/engine/test_llm_sampling.py", *EVERY)
    yield harness.pytest_line(
        f"{what}, HTTP",
        "tests/server/test_http_sampling.py",
        "tests/server/test_sampling.py",
        *EVERY,
    )
    yield harness.pytest_line(
        f"{what} equals LLM, real engine", "tests/e2e/test_streaming.py", *EVERY
    )
    what = "generation_config.json and general.sampling.* as defaults"
    defaults = ("tests/formats/test_generation.py", "tests/server/test_defaults.py")
    yield harness.pytest_line(what, *defaults, "tests/engine/test_llm_defaults.py", *EVERY)
    yield harness.pytest_line(
        "samplers and processors against the reference",
        "tests/engine/test_sampler.py",
        "tests/engine/test_processors.py",
        "tests/kernels/test_native_sampling.py",
        *EVERY,
    )
    what = "policies window, orca, served_ratio; order priority and its bound"
    yield harness.pytest_line(what, "tests/scheduler", *EVERY)
    what = "sliding windows: trim gives leading blocks back, bit-equal, Gemma 3 too"
    windows = ("tests/e2e/test_windows.py", "tests/models/test_real_windows.py")
    yield harness.pytest_line(what, *windows, *EVERY)


def commands() -> Iterator[Line]:
    yield harness.pytest_line("chat (in a terminal), generate, doctor", "tests/cli", *EVERY)
    what = "/tokenize, /detokenize, /version and the rest of the API"
    yield harness.pytest_line(
        what, "tests/server/test_http.py", "tests/server/test_openai.py", *EVERY
    )
    what = "open loop: Poisson and traces, scaling, no oracle"
    yield harness.pytest_line(what, "tests/lab", "tests/engine/test_forced_end.py", *EVERY)


def bad_input() -> Iterator[Line]:
    yield harness.pytest_line(
        "shards, shapes, tokenizer, dtype, memory, hub: refused by name",
        "tests/models/test_hf_folder.py",
        "tests/formats",
        "-k",
        "not vocabs",
        *EVERY,
    )
    what = "42 models that cannot run, the hub unreachable: one line each, from serve, generate and LLM"
    yield harness.pytest_line(what, "tests/e2e/test_bad_models.py", *EVERY)
    yield harness.pytest_line(
        "templates that raise, bad requests", "tests/server/test_text.py", *EVERY
    )
    yield harness.pytest_line(
        "the whole program, one clear line each", "tests/e2e/test_bad_input.py", *EVERY
    )


# -- peers ---------------------------------------------------------------------------------------------------


def peers() -> Iterator[Line]:
    """Judged is the same file: llama-server with the GGUF that we serve, three pairs. With the others one
    pair, and only of mixed64 with those that take minutes or run another file: half an hour in all."""
    _measure("--peers", SAME_FILE)
    _measure("--add", "--rounds", "1", "--peers", "vllm", "openvino")
    others = ("llama-q4_0", "openvino-q4_0", "transformers", "transformers-cb")
    _measure("--add", "--rounds", "1", "--peers", *others, "--workloads", "mixed64")
    for (workload, peer), pairs in table.groups(read(harness.RESULTS)).items():
        for metric in table.JUDGED[workload]:
            cell = table.cell(pairs, metric)
            unit = table.METRICS[metric][1]
            figure = f"{cell.ours:.0f} / {cell.theirs:.0f} {unit} = {cell.ratio:.2f}x ({len(pairs)} pairs)"
            judged = cell.ratio >= 1 if peer == SAME_FILE else None
            yield Line(f"{workload} {metric}: ours / {peer}", figure, judged)


def _measure(*flags: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "peers" / "run.py"), *flags], cwd=ROOT
    )
    if done.returncode:
        raise NotRun("bench/peers/run.py measured nothing; bench/peers/setup.sh installs the peers")


CHECKS = {
    "families": families,
    "real": real,
    "tokenizers": tokenizers,
    "types": types,
    "sampling": sampling,
    "commands": commands,
    "bad": bad_input,
    "peers": peers,
}

if __name__ == "__main__":
    sys.exit(harness.run("models", CHECKS))
