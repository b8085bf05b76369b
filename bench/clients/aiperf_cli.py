"""aiperf: streamed chats, tokens counted by the server, whose /metrics it reads too.

python bench/clients/aiperf_cli.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from seen import Seen, expect, expect_equal, metric

URL, MODEL, TOKENIZER = sys.argv[3:6]
REQUESTS, TOKENS = 16, 24
seen = Seen("aiperf", "aiperf")


def profiled(folder: str, kind: str) -> dict[str, Any]:
    """What it writes of its requests."""
    program = str(Path(sys.executable).parent / "aiperf")
    command = [
        program,
        "profile",
        "--url",
        URL,
        "--model",
        MODEL,
        "--tokenizer",
        TOKENIZER,
        "--streaming",
    ]
    command += [
        "--endpoint-type",
        kind,
        "--request-count",
        str(REQUESTS),
        "--concurrency",
        "4",
        "--ui",
        "none",
    ]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(TOKENS)]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--use-server-token-count",
        "--artifact-dir",
        folder,
    ]
    # it takes a folder for a name of the hub where it may not ask the hub
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    files = list(Path(folder).rglob("profile_export_aiperf.json"))
    expect(files, f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return json.loads(files[0].read_text())


def expect_figures(result: dict[str, Any], made: float) -> None:
    expect_equal(result["request_count"]["avg"], REQUESTS, "requests")
    expect(not result.get("error_summary"), f"errors {result.get('error_summary')}")
    expect_equal(result["output_sequence_length"]["avg"], TOKENS, "tokens of an answer")
    expect_equal(made, REQUESTS * TOKENS, "tokens that the server made")
    first, whole = (result[name]["avg"] for name in ("time_to_first_token", "request_latency"))
    expect(0 < first < whole, "times of a stream")


@seen.check
def chats() -> None:
    before = metric(URL, "vllm:generation_tokens_total")
    with tempfile.TemporaryDirectory() as folder:
        result = profiled(folder, "chat")
        watched = list(Path(folder).rglob("server_metrics_export.json"))
        names = set(json.loads(watched[0].read_text())["metrics"]) if watched else set()
    expect_figures(result, metric(URL, "vllm:generation_tokens_total") - before)
    expect(
        "vllm:num_requests_running" in names,
        f"metrics of the server that it read: {sorted(names)[:5]}",
    )
    first, rate = (
        result[name]["avg"] for name in ("time_to_first_token", "output_token_throughput")
    )
    seen.figure = f"TTFT {first:.0f} ms, {rate:.0f} tokens/s"


@seen.check
def completions() -> None:
    before = metric(URL, "vllm:generation_tokens_total")
    with tempfile.TemporaryDirectory() as folder:
        expect_figures(
            profiled(folder, "completions"), metric(URL, "vllm:generation_tokens_total") - before
        )


seen.tell()
