"""The whole program against bad files, settings and requests: one clear line or one clear answer each.

Real processes, the real engine on a tiny model. What is refused must not disturb what is running.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pageturner import cli

GOLDENS = Path(__file__).parent.parent / "goldens"
MODEL = GOLDENS / "tiny_llama.gguf"
SERVE = [sys.executable, "-m", "pageturner", "serve"]


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and what it said of a server that must not start."""
    done = subprocess.run(
        [*SERVE, *arguments, "--port", "0"], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight", "attn_q"),
        (b"smollm", b"marble", "marble"),
    ],
)
def test_a_bad_model_file_is_one_clear_line(
    tmp_path: Path, right: bytes, wrong: bytes, says: str
) -> None:
    """One file that the engine process meets, and one that the API process meets; more are in
    test_bad_models.py."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(MODEL.read_bytes().replace(right, wrong))
    code, said = run(str(path))
    assert code == 1
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ([""], 1, "is no name"),
        (["/nowhere/model.gguf"], 1, "/nowhere/model.gguf"),
        ([str(MODEL), "--kv-cache-memory", "1000"], 1, "KV cache"),
        ([str(MODEL), "--kv-cache-memory", "900000G"], 1, "free"),
        ([str(MODEL), "--max-model-len", "999999"], 2, "999999"),
    ],
)
def test_a_bad_setting_is_one_clear_line(flags: list[str], status: int, says: str) -> None:
    code, said = run(*flags)
    assert code == status
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--block-size 512", "256"),
        ("--policy psychic", "psychic"),
        ("--max-num-seqs 0", "max_num_seqs"),
        ("--no-such-flag", "no-such-flag"),
    ],
)
def test_a_setting_is_refused_before_anything_starts(
    flags: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    try:
        code = cli.main(["serve", str(MODEL), *flags.split()])
    except SystemExit as end:
        code = int(end.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert says in line


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*SERVE, str(MODEL), "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with little KV memory on the tiny model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--kv-cache-memory", "256K", "--served-model-name", "tiny"]
    process = subprocess.Popen([*SERVE, str(MODEL), *flags], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def post(url: str, body: object, path: str = "/v1/completions") -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(
        f"{url}{path}", content=content, headers={"Content-Type": "application/json"}, timeout=30
    )
    return answer.status_code, answer.json()["error"][
        "message"
    ] if answer.status_code != 200 else answer.text


GOOD = {
    "model": "tiny",
    "prompt": "the old house",
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
BAD = [
    ({**GOOD, "prompt": [5] * 1500}, 400, "KV"),  # more than the KV memory, less than the context
    ({**GOOD, "prompt": [5] * 5000}, 400, "context"),
    ({**GOOD, "prompt": []}, 400, "prompt"),
    ({**GOOD, "prompt": ""}, 400, "prompt"),
    ({**GOOD, "prompt": [99999]}, 400, "319"),
    ({**GOOD, "prompt": 7}, 400, "prompt"),
    ({**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    ({**GOOD, "max_tokens": -1}, 400, "max_tokens"),
    ({**GOOD, "max_tokens": "many"}, 400, "max_tokens"),
    ({**GOOD, "temperature": -0.5}, 400, "temperature"),
    ({**GOOD, "top_p": 2}, 400, "top_p"),
    ({**GOOD, "model": "other"}, 404, "other"),
    (b'{"model": "tiny", "prompt": ', 400, "JSON"),
    (b"[1, 2]", 400, ""),
]


@pytest.mark.parametrize(("body", "status", "says"), BAD)
def test_a_bad_request_is_refused_and_says_why(
    url: str, body: object, status: int, says: str
) -> None:
    code, message = post(url, body)
    assert (code, says in message) == (status, True), message


def test_a_huge_body_is_refused(url: str) -> None:
    code, _ = post(url, {**GOOD, "prompt": "x" * 10_000_000})
    assert code == 413


def test_nobody_else_is_affected(url: str) -> None:
    body = {**GOOD, "max_tokens": 120}
    alone = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    during: list[str] = []

    def ask() -> None:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        during.append(answer.json()["choices"][0]["text"])

    asking = threading.Thread(target=ask)
    asking.start()
    for bad, status, _ in BAD:
        assert post(url, bad)[0] == status
    asking.join()
    assert during == [alone]
    assert httpx.get(f"{url}/health").status_code == 200
