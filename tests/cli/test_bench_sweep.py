"""`pageturner bench sweep` beside real servers with the fake engine: files, order, failures, Ctrl-C."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Terminal
from pageturner import cli
from server.conftest import Server

QUICK = ["--seconds", "5", "--requests", "4", "--input-len", "6", "--output-len", "4"]


def sweep(*words: str) -> int:
    return cli.main(["bench", "sweep", *QUICK, *words])


def written(name: str = "sweep.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(name).read_text())
    return found


def test_two_servers_and_one_that_is_not_there(
    fake: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [
        f"--server=a={fake.url}",
        f"--server=b={fake.url}/v1",
        "--server=dead=http://127.0.0.1:9",
    ]
    code = sweep(
        *servers, "--concurrency", "1,2", "--rate", "20", "--rounds", "2", "--goodput", "ttft:60000"
    )
    assert code == 1, "one of them failed"
    out, said = capsys.readouterr()
    runs = re.findall(r"^(\w+), (\S+ \S+), (\d)/2: .* 0 failed$", said, re.M)
    loads = ["1 clients", "2 clients", "20 requests/s"]
    assert runs == [(name, load, turn) for load in loads for turn in "12" for name in "ab"]
    assert max(len(line) for line in out.splitlines() if not line.startswith("note: ")) <= 100
    assert "note: dead is left out" in out
    assert "pageturner calibrate MODEL" in out, "how to have something simulated"
    data = written()
    assert [one["over"] for one in data["sweeps"]] == ["concurrency", "rate"]
    assert data["servers"][0]["model"] == "fake"
    assert "Connect" in data["servers"][2]["failed"]
    point = data["sweeps"][0]["points"][1]["servers"]["a"]
    assert (point["requests"], point["counted"], point["errors"]) == (12, 8, 0)
    assert point["median"]["goodput_share"] == 1.0
    assert point["median"]["output_tokens_per_s"] > 0
    assert "dead" in Path("sweep.html").read_text()


class StrictHandler(BaseHTTPRequestHandler):
    """A server that lists no models and refuses fields that it does not know, as Transformers' does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(500, b"Internal Server Error")

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "ignore_eos" in fields:
            self._answer(422, b'{"detail": "Unexpected fields in the request: {\'ignore_eos\'}"}')
            return
        chunk = {"choices": [{"text": " a", "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 1}}
        events = [f"data: {json.dumps(one)}\n\n" for one in (chunk, usage)]
        self._answer(200, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def test_a_server_that_refuses_fields_is_asked_without_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), StrictHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert sweep(f"--server=strict={url}", "--concurrency", "1", "--rounds", "1") == 1
        assert (
            "strict is left out: it does not say which model it serves" in capsys.readouterr().err
        )
        words = [
            f"--server=strict={url}",
            "--ask",
            "strict=it",
            "--concurrency",
            "1",
            "--rounds",
            "1",
        ]
        assert sweep(*words) == 0
        server.shutdown()
    said = capsys.readouterr()
    assert "note: strict refuses ignore_eos" in said.out
    assert "0 failed" in said.err


def test_automatic_loads_end_where_they_are_told_to(fake: Server) -> None:
    code = sweep(
        f"--server=a={fake.url}",
        "--rounds",
        "1",
        "--max-concurrency",
        "2",
        "--endpoint",
        "chat",
        "--output",
        "deep/page.html",
        "--output-json",
        "other.json",
    )
    assert code == 0
    assert [point["at"] for point in written("other.json")["sweeps"][0]["points"]] == [1, 2]
    assert Path("deep/page.html").exists()


def test_a_rate_that_is_not_given_begins_below_what_one_client_gets(fake: Server) -> None:
    code = sweep(
        f"--server=a={fake.url}", "--rounds", "1", "--rate", "auto", "--total-seconds", "1"
    )
    assert code == 0
    points = written()["sweeps"][0]["points"]
    assert points[0]["at"] > 0.1
    assert all(b["at"] == 2 * a["at"] for a, b in itertools.pairwise(points))


@pytest.mark.slow
def test_what_was_measured_is_written_when_it_is_interrupted(
    fake: Server, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    output = tmp_path / "page.html"
    program = terminal(
        "bench",
        "sweep",
        *QUICK,
        f"--server=a={fake.url}",
        "--rounds",
        "1000",
        "--concurrency",
        "2",
        "--output",
        str(output),
    )
    program.until("2/1000")  # the first round is over
    program.type("\x03")
    program.until("interrupted; what was measured until then")
    assert program.process.wait(60) == 130
    data = written(str(output.with_suffix(".json")))
    assert data["interrupted"]
    assert data["sweeps"][0]["points"][0]["servers"]["a"]["answered"] >= 6
    assert "It was interrupted" in output.read_text()


@pytest.mark.slow
def test_our_own_server_is_started_and_ended(tiny: list[str], tmp_path: Path) -> None:
    """Two settings of it; told to end in the middle, neither is left behind."""
    model, *flags = tiny
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "bench",
        "sweep",
        *QUICK,
        "--model",
        model,
        "--own",
        f"plain={' '.join(flags)}",
        "--own",
        f"static={' '.join(flags)} --policy static",
        "--own",
        "broken=--no-such-flag",
        "--concurrency",
        "2",
        "--rounds",
        "1000",
    ]
    program = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert program.stderr is not None
    lines = []
    while not any("static, 2 clients, 1/1000" in line for line in lines):
        lines.append(program.stderr.readline())
        assert lines[-1], "".join(lines)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    program.send_signal(signal.SIGTERM)
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 130, out
    assert len(children) == 2
    assert not any(os.path.exists(f"/proc/{child}") for child in children)
    data = written(str(tmp_path / "sweep.json"))
    assert [bool(one["failed"]) for one in data["servers"]] == [False, False, True]
    assert "no-such-flag" in data["servers"][2]["failed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which servers"),
        (["--server", "http://x"], "NAME=URL"),
        (["--server", "a=ftp://x"], "http://HOST:PORT"),
        (["--server", "a=http://x", "--server", "a=http://y"], "twice"),
        (["--server", "a=http://x", "--ask", "b=m"], "no --server of this name"),
        (["--own", "a="], "--model"),
        (["--model", "m", "--own", "a=", "--server", "a=http://x"], "two servers"),
        (["--server", "a=http://x", "--concurrency", "1,x"], "--concurrency"),
        (["--server", "a=http://x", "--concurrency", "1.5"], "whole"),
        (["--server", "a=http://x", "--rate", "0"], "more than 0"),
        (["--server", "a=http://x", "--seconds", "0"], "--seconds"),
        (["--server", "a=http://x", "--goodput", "itl:3"], "--goodput"),
    ],
)
def test_flags_that_make_no_sense(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "sweep", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--server", "a=http://127.0.0.1:9") == 1
    assert "Connect" in capsys.readouterr().err
    assert not Path("sweep.html").exists()
