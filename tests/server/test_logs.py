"""The log as JSON: one object a line, whatever is logged, in every process; and what is not logged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server

PROMPT, KEY = "a prompt that is nobody's business", "a-key-that-is-nobodys-business"


def objects(text: str) -> list[dict[str, Any]]:
    """Each line of a log, which must be an object with what every line has."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line)
        at = datetime.fromisoformat(line["time"])
        assert line["time"].endswith("Z")
        assert at.utcoffset() == timedelta(0)
        assert line["level"] in ("debug", "info", "warning", "error", "critical")
    return lines


def json_server(start: Callable[..., Server], *flags: str, **env: str) -> Server:
    server = start("--log-format", "json", *flags, **env)
    server.http.close()
    server.url = re.search(r"listening on (\S+);", server.log)[1]  # type: ignore[index]
    server.http = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
    return server


@pytest.mark.slow
def test_access_lines_say_what_happened_and_no_secrets(start: Callable[..., Server]) -> None:
    server = json_server(
        start, "--api-key", f"shop:{KEY},other:another-key", "--log-level", "debug"
    )
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "trace-me.1"}
    body = {"prompt": PROMPT, "max_tokens": 2, "stop": "never mind", "user": "somebody"}
    assert (
        server.http.post(f"/v1/completions?key={KEY}", json=body, headers=headers).status_code
        == 200
    )
    wrong = server.http.post(
        "/v1/completions", json=body, headers={"authorization": "Bearer wrong-key"}
    )
    assert wrong.status_code == 401
    odd = server.http.post("/v1/completions", json=body | {"n": 0}, headers=headers)
    assert odd.status_code == 400
    server.stop()
    lines = objects(server.finished())
    line = next(line for line in lines if line.get("request_id") == "trace-me.1")
    expected = {
        "level": "info",
        "logger": "pageturner",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 34,
        "output_tokens": 2,
        "finish_reason": "length",
        "tenant": "shop",
    }
    assert {name: line[name] for name in expected} == expected
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    told = [(line["status"], line.get("error")) for line in lines if "status" in line]
    assert told == [(200, None), (401, "invalid_api_key"), (400, "invalid_value")]
    for secret in (KEY, "wrong-key", PROMPT, "never mind"):
        assert secret not in server.log


@pytest.mark.slow
def test_who_only_watches_is_logged_at_debug(start: Callable[..., Server]) -> None:
    server = json_server(start, "--log-level", "debug")
    watching = ("/health", "/metrics", "/v1/live", "/ping", "/load")
    for path in (*watching, "/v1/models"):
        assert server.http.get(path).status_code == 200
    server.stop()
    told = {line["path"]: line["level"] for line in objects(server.finished()) if "path" in line}
    assert told == dict.fromkeys(watching, "debug") | {"/v1/models": "info"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["route", "http://127.0.0.1:9", "http://127.0.0.1:9"], "is there twice"),
        (["serve", "/there/is/no/model.gguf"], "/there/is/no/model.gguf"),
        (
            ["batch", "/there/is/no/file.jsonl", "out.jsonl", "--url", "http://127.0.0.1:9"],
            "file.jsonl",
        ),
    ],
)
def test_what_cannot_start_says_so_in_one_object(
    command: list[str], said: str, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "pageturner", *command, "--log-format", "json"]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode in (1, 2)
    (line,) = objects(done.stderr)
    assert line["level"] == "error"
    assert said in line["message"]


@pytest.mark.slow
def test_the_router_names_its_replica(start: Callable[..., Server]) -> None:
    replica = start()
    router = json_server(start, replica.url, command="route")
    body = {"prompt": PROMPT, "max_tokens": 2}
    asked = router.http.post("/v1/completions", json=body, headers={"x-request-id": "r.2"})
    assert asked.status_code == 200
    router.stop()
    line = next(line for line in objects(router.finished()) if line.get("request_id") == "r.2")
    assert line["replica"] in replica.url
    assert line["tries"] == 1
    assert PROMPT not in router.log


PROGRAM = """
import logging, sys, warnings
from pageturner import logs

logs.to_stderr("warning", "json")
log = logging.getLogger("pageturner")
try:
    raise ValueError("two\\nlines \\ud800 {")
except ValueError:
    log.exception("a request\\nfailed", extra={"fields": {"request_id": "x", "level": "forged"}})
log.info("too fine")
logs.say("always said")
warnings.warn("deprecated", stacklevel=1)
import subprocess
child = "import logging; from pageturner import logs; logs.as_parent(); logging.getLogger('a').error('child')"
subprocess.run([sys.executable, "-c", child], check=True)
raise RuntimeError("the end")
"""


def test_one_object_a_line_whatever_is_logged() -> None:
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    failed, said, warned, child, end = objects(done.stderr)
    assert failed["level"] == "error"
    assert failed["request_id"] == "x"
    assert "Traceback" in failed["exception"]
    assert "two\nlines" in failed["exception"]
    assert said["message"] == "always said"
    assert "deprecated" in warned["message"]
    assert (child["logger"], child["message"]) == ("a", "child")
    assert end["level"] == "critical"
    assert "the end" in end["exception"]


def test_text_stays_as_it_was() -> None:
    program = "from pageturner import logs; logs.to_stderr('info'); logs.say('a sentence'); logs.as_parent()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "pageturner: a sentence\n"
