"""Replicas and streamed answers, for the parts that measure routers. What a router promises when replicas are
killed or drained is held by tests/server/test_stream_migration.py and tests/router.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import harness
from harness import ROOT

TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
KEY = "drain-key"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@dataclass
class Replica:
    """One server of the fleet on a port of its own."""

    model: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        template = harness.RESULTS / "template.jinja"
        template.parent.mkdir(parents=True, exist_ok=True)
        template.write_text(TEMPLATE)
        command = [
            sys.executable,
            "-m",
            "pageturner",
            "serve",
            self.model,
            "--port",
            str(self.port),
        ]
        command += ["--admin-key", KEY, "--served-model-name", "m"]
        if self.model == str(TINY):
            command += ["--chat-template", str(template)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        harness.wait_ready(self.url, self.process, 180.0)

    def kill(self) -> None:
        """The server and its engine, at once."""
        assert self.process is not None
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def drain(self, on: bool) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"{self.url}/v1/admin/drain",
            json.dumps({"drain": on}).encode(),
            method="POST",
            headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


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
