"""sglang's bench_serving: its random requests, streamed, on /v1/completions and chats.

    python bench/clients/sglang_bench.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)

The package as a whole needs gigabytes of CUDA. Its benchmark does not: packages above it are passed over by
empty ones, and of a module of its engine it gets the one constant that it reads.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from seen import Seen, expect, expect_equal, metric

REQUESTS, TOKENS = 16, 24


def alone() -> None:
    """Run the benchmark without the engine."""
    found = importlib.metadata.distribution("sglang").locate_file("sglang")
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(str(found), *name.split(".")[1:])]
        sys.modules[name] = package
    one = types.ModuleType("sglang.srt.disaggregation.utils")
    vars(one)["FAKE_BOOTSTRAP_HOST"] = "2.2.2.2"
    sys.modules[one.__name__] = one
    runpy.run_module("sglang.benchmark.serving", run_name="__main__")


def benched(url: str, model: str, tokenizer: str, *more: str) -> dict[str, float]:
    """What it writes of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.jsonl"
        command = [
            sys.executable,
            __file__,
            "--base-url",
            url,
            "--model",
            model,
            "--tokenizer",
            tokenizer,
        ]
        command += [
            "--dataset-name",
            "random-ids",
            "--random-input-len",
            "64",
            "--random-output-len",
            str(TOKENS),
        ]
        command += [
            "--random-range-ratio",
            "1",
            "--num-prompts",
            str(REQUESTS),
            "--max-concurrency",
            "8",
        ]
        command += ["--output-file", str(file), "--warmup-requests", "0", "--disable-tqdm", *more]
        environment = os.environ | {"BENCH_ALONE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        expect(file.exists(), f"status {done.returncode}: {done.stderr[-300:]}")
        return json.loads(file.read_text().splitlines()[-1])


def expect_figures(result: dict[str, float], made: float) -> None:
    expect_equal(result["completed"], REQUESTS, "requests that were completed")
    expect_equal(result["total_output_tokens"], REQUESTS * TOKENS, "tokens that it counted")
    expect_equal(made, REQUESTS * TOKENS, "tokens that the server made")
    expect(0 < result["mean_ttft_ms"] < result["mean_e2e_latency_ms"], "times of a stream")


def main() -> None:
    url, model, tokenizer = sys.argv[3:6]
    seen = Seen("sglang bench_serving", "sglang")

    @seen.check
    def completions() -> None:
        before = metric(url, "vllm:generation_tokens_total")
        result = benched(url, model, tokenizer, "--backend", "vllm")
        expect_figures(result, metric(url, "vllm:generation_tokens_total") - before)
        seen.figure = (
            f"TTFT {result['mean_ttft_ms']:.0f} ms, {result['output_throughput']:.0f} tokens/s"
        )

    @seen.check
    def chats() -> None:
        before = metric(url, "vllm:generation_tokens_total")
        result = benched(url, model, tokenizer, "--backend", "vllm-chat")
        expect_figures(result, metric(url, "vllm:generation_tokens_total") - before)

    seen.tell()


if __name__ == "__main__":
    if os.environ.pop("BENCH_ALONE", ""):
        alone()
    else:
        main()
