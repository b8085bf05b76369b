"""A trace against a real server: it ends where the trace did, and the server was told only the cap."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pageturner import cli

GOLDEN = Path(__file__).parent.parent / "goldens" / "tiny_llama.gguf"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "serve",
        str(GOLDEN),
        "--port",
        "0",
        "--developer",
    ]
    process = subprocess.Popen(
        [*command, "--backend", "reference", "--served-model-name", "tiny"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "listening on " in line:
            break
    assert "listening on " in seen, seen
    yield line.split("listening on ")[1].split(";")[0]
    process.terminate()
    process.communicate(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_trace_is_replayed_without_an_oracle(url: str, endpoint: str, tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "figures.json"
    lengths = [3, 40, 1, 7]
    rows = [
        {"arrival_s": i / 50, "prompt_tokens": 9, "output_tokens": n} for i, n in enumerate(lengths)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = [
        "--base-url",
        url,
        "--model",
        "tiny",
        "--trace",
        str(trace),
        "--cap",
        "20",
        "--warmup",
        "1",
    ]
    words += [
        "--endpoint",
        endpoint,
        "--tokenizer",
        str(GOLDEN),
        "--goodput",
        "ttft:60000",
        "e2e:60000",
    ]
    assert cli.main(["bench", "serve", *words, "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert figures["failed"] == 0
    assert figures["output_tokens"] == 3 + 20 + 1 + 7
    assert "no oracle" in figures["load"]
    assert figures["goodput"]["requests"] == 4
