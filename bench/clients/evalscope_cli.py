"""evalscope perf: streamed chats with prompts of a file.

python bench/clients/evalscope_cli.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from seen import Seen, expect, expect_equal, metric

URL, MODEL, TOKENIZER = sys.argv[3:6]
REQUESTS, TOKENS = 16, 24
seen = Seen("evalscope perf", "evalscope")


@seen.check
def chats() -> None:
    before = metric(URL, "vllm:generation_tokens_total")
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text(
            "\n".join(f"Write a story about the number {k}." for k in range(REQUESTS))
        )
        program = str(Path(sys.executable).parent / "evalscope")
        command = [
            program,
            "perf",
            "--url",
            f"{URL}/v1/chat/completions",
            "--model",
            MODEL,
            "--api",
            "openai",
        ]
        command += [
            "--tokenizer-path",
            TOKENIZER,
            "--dataset",
            "line_by_line",
            "--dataset-path",
            str(prompts),
        ]
        command += [
            "--number",
            str(REQUESTS),
            "--parallel",
            "4",
            "--max-tokens",
            str(TOKENS),
            "--stream",
        ]
        command += [
            "--extra-args",
            '{"ignore_eos": true}',
            "--outputs-dir",
            folder,
            "--no-test-connection",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        files = list(Path(folder).rglob("benchmark_summary.json"))
        expect(files, f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        result = json.loads(files[0].read_text())
    made = metric(URL, "vllm:generation_tokens_total") - before
    expect_equal((result["Success Requests"], result["Failed Requests"]), (REQUESTS, 0), "requests")
    expect_equal(
        (result["Avg Output Tokens"], made), (TOKENS, REQUESTS * TOKENS), "tokens that were made"
    )
    expect(0 < result["Avg TTFT (ms)"] < 1000 * result["Avg Latency (s)"], "times of a stream")
    seen.figure = (
        f"TTFT {result['Avg TTFT (ms)']:.0f} ms, {result['Output Throughput (tok/s)']:.0f} tokens/s"
    )


seen.tell()
