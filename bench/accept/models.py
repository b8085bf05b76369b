"""`make accept NAME=models`: quality of the real models and of each GGUF type, and the peers beside us.

real    the real models against Transformers on the dequantised file
types   each GGUF type against fp32
peers   the table of bench/peers/run.py
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

import quality
import quality_types
from pageturner.formats import hub
from peers import launch, table
from peers.run import read

TOKENS = 2048  # of prose, for each measurement of quality
SAME_FILE = "llama"  # the peer that runs the very file that we run


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


# -- types ---------------------------------------------------------------------------------------------------


def types() -> Iterator[Line]:
    """Each GGUF type, in files that llama-quantize makes of SmolLM2, which was Q4_1 before."""
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


CHECKS = {"real": real, "types": types, "peers": peers}

if __name__ == "__main__":
    sys.exit(harness.run("models", CHECKS))
