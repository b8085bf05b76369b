"""inference-perf: random prompts on /v1/completions, shared prefixes on chats, streamed, at a constant rate.

python bench/clients/inference_perf_cli.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from seen import Seen, expect, expect_equal, metric

URL, MODEL, TOKENIZER = sys.argv[3:6]
REQUESTS, TOKENS = 16, 24
LENGTH = {"std_dev": 0, "total_count": REQUESTS}
DATA: dict[str, Any] = {
    "completion": {
        "type": "random",
        "input_distribution": {"min": 64, "max": 64, "mean": 64, **LENGTH},
        "output_distribution": {"min": TOKENS, "max": TOKENS, "mean": TOKENS, **LENGTH},
    },
    "chat": {
        "type": "shared_prefix",
        "shared_prefix": {
            "num_groups": 2,
            "num_prompts_per_group": 8,
            "system_prompt_len": 64,
            "question_len": 16,
            "output_len": TOKENS,
        },
    },
}
seen = Seen("inference-perf", "inference-perf")


def performed(kind: str) -> dict[str, Any]:
    """What it writes of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "load": {
                "type": "constant",
                "stages": [{"rate": 4, "duration": REQUESTS // 4}],
                "num_workers": 1,
            },
            "api": {"type": kind, "streaming": True},
            "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
            "data": DATA[kind],
            "report": {"request_lifecycle": {"summary": True}},
            "storage": {"local_storage": {"path": f"{folder}/out"}},
        }
        file = Path(folder) / "config.yml"
        file.write_text(json.dumps(config))  # which is YAML too
        command = [str(Path(sys.executable).parent / "inference-perf"), "--config_file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
        files = list(Path(folder).rglob("summary_lifecycle_metrics.json"))
        expect(files, f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        return json.loads(files[0].read_text())


def expect_figures(kind: str) -> dict[str, Any]:
    before = metric(URL, "vllm:generation_tokens_total")
    result = performed(kind)
    well = result["successes"]
    expect_equal((well["count"], result["failures"]["count"]), (REQUESTS, 0), "requests")
    counted = well["output_len"]["mean"]  # by its own tokenizer, from the text
    expect(TOKENS - 2 < counted < TOKENS + 2, f"{counted} tokens of an answer")
    expect_equal(
        metric(URL, "vllm:generation_tokens_total") - before,
        REQUESTS * TOKENS,
        "tokens that were made",
    )
    latency = well["latency"]
    first, whole = latency["time_to_first_token"]["mean"], latency["request_latency"]["mean"]
    expect(0 < first < whole, "times of a stream")
    return latency


@seen.check
def completions() -> None:
    latency = expect_figures("completion")
    seen.figure = f"TTFT {1000 * latency['time_to_first_token']['mean']:.0f} ms"


@seen.check
def chats() -> None:
    expect_figures("chat")


seen.tell()
