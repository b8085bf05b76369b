"""Streamed answers, for the parts that measure routers. What a router promises when replicas are
killed or drained is held by tests/server/test_stream_migration.py and tests/router.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from harness import ROOT

TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"


def stream(
    url: str, path: str, body: dict[str, Any], begun: list[int] | None = None
) -> tuple[str, bool, float]:
    """The text of a streamed answer, whether it ended as it should, seconds to its first byte. begun: gets
    an entry then."""
    asked = urllib.request.Request(
        url + path, json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    text, ended, begin, first = "", False, time.monotonic(), 0.0
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if not first:
                first = time.monotonic() - begin
                if begun is not None:
                    begun.append(1)
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                return text, False, first
            if path == "/v1/responses":
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
                ended = ended or event["type"] in ("response.completed", "response.incomplete")
            elif path == "/v1/messages":
                text += event.get("delta", {}).get("text", "")
                ended = ended or event["type"] == "message_stop"
            else:
                for choice in event["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text, ended, first


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        rows = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)
