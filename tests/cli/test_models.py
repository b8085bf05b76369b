"""`pull`, `list` and `rm`: aliases in a cache of ours, ids from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli
from pageturner.cli import models
from pageturner.formats import hub
from support.refusals import engine_fault

WEIGHTS = os.urandom(300_000)
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}
COMMIT = "a" * 40


class SmallHub(BaseHTTPRequestHandler):
    """One repository, org/tiny, as the hub's API shows it. The first answer with weights is cut in half."""

    protocol_version = "HTTP/1.1"
    files = FILES
    ranges: list[str]
    cut: list[bool]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/tiny"):
            listed = [{"rfilename": file} for file in self.files]
            about = {"id": "org/tiny", "sha": COMMIT, "siblings": listed, "private": False}
            tree = [
                {"type": "file", "path": f, "size": len(c), "oid": "0" * 40}
                for f, c in self.files.items()
            ]
            return self.send(200, json.dumps(tree if "/tree/" in self.path else about).encode())
        if not self.path.startswith("/org/tiny/resolve/") or name not in self.files:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        content = self.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"' + hashlib.sha1(content).hexdigest() + '"'}
        if name.endswith(".safetensors"):
            headers["X-Linked-Etag"] = '"' + hashlib.sha256(WEIGHTS).hexdigest() + '"'
            headers["X-Linked-Size"] = str(len(content))
            if self.command == "GET":
                self.ranges.append(self.headers.get("Range", ""))
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send(206 if start else 200, content[start:], headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "GET":
            return
        if self.cut and len(body) == len(WEIGHTS):
            self.cut.pop()
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)


@pytest.fixture
def small_hub() -> Iterator[tuple[str, type[SmallHub]]]:
    handler = type("Handler", (SmallHub,), {"ranges": [], "cut": [True]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def pageturner(place: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(place / "hf"),
        "PAGETURNER_CACHE": str(place / "own"),
    }
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": ""}
    command = [sys.executable, "-m", "pageturner", *words]
    return subprocess.run(
        command,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_an_id_is_pulled_checked_listed_and_removed(
    tmp_path: Path, small_hub: tuple[str, type[SmallHub]]
) -> None:
    url, handler = small_hub
    done = pageturner(tmp_path, url, "pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert "1 large files have the hash" in done.stdout
    assert handler.ranges[0] == ""
    assert len(handler.ranges) == 2  # half a file was not taken for a whole one
    listed = json.loads(pageturner(tmp_path, url, "list", "--json").stdout)
    assert [(model["name"], model["kind"]) for model in listed] == [("org/tiny", "hub")]
    assert listed[0]["bytes"] >= len(WEIGHTS)
    asked = pageturner(tmp_path, url, "rm", "org/tiny")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    assert pageturner(tmp_path, url, "rm", "org/tiny", "--yes").stdout == "org/tiny: removed\n"
    assert "no model was fetched yet" in pageturner(tmp_path, url, "list").stdout


def test_other_bytes_than_the_hub_promised(
    tmp_path: Path, small_hub: tuple[str, type[SmallHub]]
) -> None:
    url, handler = small_hub
    handler.cut.clear()
    handler.files = FILES | {"model.safetensors": bytes(len(WEIGHTS))}
    done = pageturner(tmp_path, url, "pull", "org/tiny")
    assert (done.returncode, "another sha256" in done.stderr) == (1, True), done.stderr
    assert not [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size == len(WEIGHTS)]


def test_a_full_disk_is_seen_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    big = type("File", (), {"will_download": True, "file_size": 1 << 60})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **b: [big])
    with engine_fault("MB free", code="disk_full"):
        models.room("org/tiny")

    def full(*arguments: object, **named: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with engine_fault(code="disk_full"):
        hub.resolve("org/tiny")


def test_an_alias_is_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_of_the_hub", list)
    path = hub.cache_folder() / hub.ALIASES["smollm2"].filename
    path.parent.mkdir()
    path.write_bytes(bytes(2_000_000))
    assert cli.main(["list"]) == 0
    assert "smollm2     2.0 MB  alias" in capsys.readouterr().out
    assert not models.remove("smollm2", yes=False, ask=lambda question: "n")
    assert path.exists()
    assert models.remove("smollm2", yes=False, ask=lambda question: "y")
    assert not path.exists()
    with engine_fault("there are none"):
        models.remove("smollm2", yes=True)


def test_a_use_is_noted_whatever_the_file_system_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_of_the_hub", list)
    monkeypatch.setattr(hub, "_is_whole", lambda path, source: path.is_file())
    path = hub.cache_folder() / hub.ALIASES["smollm2"].filename
    path.parent.mkdir()
    path.write_bytes(b"weights")
    os.utime(path, (1_000_000, 1_000_000))
    assert models.kept()[0].used == 1_000_000
    assert hub.resolve("smollm2", offline=True).path == path
    assert models.kept()[0].used > 1_700_000_000
    assert path.stat().st_mtime == 1_000_000, "it is what other caches know the file by"


def test_short_names_are_ids_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        hub, "_snapshot", lambda reference, offline: hub.ModelFile(tmp_path, reference)
    )
    assert hub.resolve("qwen3-0.6b") == hub.ModelFile(tmp_path, "qwen3-0.6b")
    assert not set(hub.HUB_ALIASES) & set(hub.ALIASES)
    assert all(hub.is_hub_id(alias) for alias in hub.HUB_ALIASES)
    assert not hub.is_hub_id("smollm2")
