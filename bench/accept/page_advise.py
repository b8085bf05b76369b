"""Tools that advise: the capacity question, asked of `pageturner simulate` as people type it.

Owns the question, "how many H100 for Llama-3.1-8B and the Mooncake conversation trace at a TTFT p99 of 2 s",
and what is asked of its answer: that a prompt alone is looked at first, that lines say what is tried, that it
takes at most two minutes, that one replica less was tried, and that one process gives the same answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from time import monotonic
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

from harness import DATA, ROOT, Line, NotRun  # noqa: E402

TRACE = DATA / "traces" / "mooncake_conversation.jsonl.gz"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # Llama 3.1 8B, by its published config.json
MOST = 120.0  # seconds
FEW = 3000  # requests, for the answers that are compared
DECIDED = ("--mfu", "--mbu", "--overhead-ms", "--goodput", "--cap", "--placement", "--replicas")


@dataclass(frozen=True, slots=True)
class Said:
    """What the command said, and what it took: seconds by the clock and of processors."""

    code: int
    out: str
    err: str
    wall: float
    cpu: float
    runs: list[dict[str, Any]]


def simulate(*flags: str) -> Said:
    """Run `pageturner simulate` on the question's model, GPU and trace."""
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder) / "config.json", Path(folder) / "answer.json"
        model.write_text(json.dumps(MODEL))
        command = [
            sys.executable,
            "-m",
            "pageturner",
            "simulate",
            "--model",
            str(model),
            "--gpu",
            "H100",
            "--trace",
            str(TRACE),
            "--output",
            str(output),
            *flags,
        ]
        begin, before = monotonic(), os.times()
        with Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
            out, err = process.communicate()
        wall, after = monotonic() - begin, os.times()
        used = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        runs = json.loads(output.read_text())["runs"] if output.exists() else []
    return Said(process.returncode, out, err, wall, used, runs)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """The question, and what surrounds it."""
    if not TRACE.exists():
        raise NotRun(f"{TRACE.name} is not there")
    targets = ("--search", "--ttft-ms", "2000")
    alone = simulate(*targets, "--gpus", "1")
    tries = re.search(r"try (.*)", alone.err)
    told = f"{alone.wall:.1f} s ({alone.cpu:.1f} s of processors): {alone.err.strip()}"
    passed = alone.code == 1 and "alone" in alone.err and tries is not None and "--gpus" in tries[1]
    yield Line(
        "one GPU a replica: that a prompt alone misses is said first, and what to try", told, passed
    )
    answer = simulate(*targets)
    (best,) = answer.runs or [{}]
    counts = re.findall(r"^([\d,]+) replicas? of (\d+) x H100: (enough|too few)", answer.err, re.M)
    told = next(
        (line for line in answer.out.splitlines() if line.startswith("cheapest")), answer.err[-300:]
    )
    figure = f"{answer.wall:.0f} s, {answer.cpu:.0f} s of processors on {os.cpu_count()}: {told}"
    yield Line(f"the capacity question in {MOST:.0f} s", figure, bool(best) and answer.wall <= MOST)
    less = (f"{best.get('replicas', 0) - 1:,}", str(best.get("gpus_per_replica")), "too few")
    yield Line(
        "one replica less was tried, and is too few",
        ", ".join(map(" ".join, counts)),
        less in counts,
    )
    tried = [line for line in answer.err.splitlines() if "replica" in line]
    yield Line(
        "lines say which count is tried, without a terminal", f"{len(tried)} lines", len(tried) > 5
    )
    found = [simulate(*targets, "--num-prompts", str(FEW), "--workers", str(n)) for n in (1, 2)]
    same = found[0].runs == found[1].runs and bool(found[0].runs)
    figure = f"{[run['gpus'] for run in found[0].runs]} GPUs; {found[0].wall:.0f} s and {found[1].wall:.0f} s"
    yield Line(
        f"its first {FEW:,} requests: one process and two give the same answer", figure, same
    )
    text = simulate("--help").out
    shown = [
        flag for flag in DECIDED if re.search(rf"{flag} [^\n]*(\n {{3,}}[^\n]*)*?\(default", text)
    ]
    lacks = ", ".join(flag for flag in DECIDED if flag not in shown)
    yield Line("the defaults that decide are in --help", lacks or "all of them", not lacks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""
