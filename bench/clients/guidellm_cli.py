"""guidellm: a concurrent run of streamed chats with made prompts.

python bench/clients/guidellm_cli.py URL MODEL SHORT_URL SHORT_MODEL TOKENIZER      (it asks the second)
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
seen = Seen("guidellm", "guidellm")


@seen.check
def chats() -> None:
    before = metric(URL, "vllm:generation_tokens_total")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        program = str(Path(sys.executable).parent / "guidellm")
        command = [program, "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}"]
        command += ["--profile", "kind=concurrent,streams=[4]"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"]
        command += ["--output", f"kind=json,path={file}", "--disable-console"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        expect(file.exists(), f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    expect_equal((totals["successful"], totals["errored"]), (REQUESTS, 0), "requests")
    tokens = metrics["output_token_count"]["successful"]["mean"]
    expect_equal(tokens, TOKENS, "tokens of an answer")
    made = metric(URL, "vllm:generation_tokens_total") - before
    # beside its requests: a token with which it sees whether the model answers; what it began and left
    left, more = totals["incomplete"], made - REQUESTS * TOKENS
    expect(
        0 <= more <= 1 + left * TOKENS, f"{made:.0f} tokens were made, {left} requests were left"
    )
    first = metrics["time_to_first_token_ms"]["successful"]["mean"]
    expect(first > 0, f"time to the first token {first}")
    seen.figure = f"TTFT {first:.0f} ms"


seen.tell()
