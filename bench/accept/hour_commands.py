"""Commands of the first hour: plan by an id of the hub, generate as a chat, compare on a busy machine, progress."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import harness
from harness import ROOT, Line, command
from hour_start import SILENT_S, watched

QUESTION = "What does HTTP stand for?"
SCREEN, SCREENS = (1280, 900), 3
SIMULATION = "--model examples/llama-3.1-8b.json --gpu H100 --rate 40 --num-prompts 30000"


@contextlib.contextmanager
def hub(asked: list[str]) -> Iterator[str]:
    """A hub with the configuration of one model; what is asked of it is noted."""
    config = (ROOT / "examples" / "llama-3.1-8b.json").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            found = self.path.endswith("/resolve/main/config.json")
            self.send_response(200 if found else 404)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", str(len(config)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(config)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def plan_lines() -> Iterator[Line]:
    asked: list[str] = []
    with hub(asked) as url, tempfile.TemporaryDirectory() as folder:
        own = {"HF_ENDPOINT": url, "HF_HOME": folder, "PAGETURNER_CACHE": folder}
        words = command("plan", "some-org/some-8b", "--gpu", "H100")
        done = harness.ran(*words, env={**os.environ, **own}, timeout=300)
    files = {path.partition("/resolve/main/")[2] for path in asked if "/resolve/" in path}
    figure = f"asked for {', '.join(sorted(files))}; status {done.returncode} {done.stderr[-100:]}"
    yield Line("plan ORG/NAME fetches config.json alone", figure, files == {"config.json"})
    memory = next((line for line in done.stdout.splitlines() if line.startswith("memory")), "")
    yield Line(
        "an H100 has the bytes of its driver", " ".join(memory.split()), "81,559 MiB" in memory
    )


def generate_lines() -> Iterator[Line]:
    said = {}
    for flag in ("", "--chat", "--no-chat"):
        words = ["generate", "--temperature", "0", "-n", "30", *flag.split(), QUESTION]
        said[flag] = harness.ran(*command(*words)).stdout.strip()
    good = said[""] == said["--chat"] != said["--no-chat"]
    yield Line("generate chats by default", said[""][:120], good)


def compare_lines(folder: Path) -> Iterator[Line]:
    """On a machine with sixteen busy loops."""
    page = folder / "compare.html"
    words = ["compare", "--policies", "static,chunked", "--num-prompts", "8", "--output", str(page)]
    with harness.busy(16), watched(command(*words), ROOT, cache()) as (said, process):
        process.wait(900)
    silent, before = said.silence(said.lines[-1][0])
    yield Line(
        "compare, busy: longest silence",
        f"{silent:.1f} s, behind: {before[:60]}",
        silent <= SILENT_S,
    )
    text = [line for _, line in said.lines]
    busy = next((i for i, line in enumerate(text) if line.startswith("This machine was busy")), -1)
    table = next((i for i, line in enumerate(text) if "output tokens/s" in line), -1)
    yield Line("compare says first that the machine was busy", text[busy][:100], 0 <= busy < table)
    found = json.loads(page.with_suffix(".json").read_text())
    judged = [one for one in found["claims"] if one["verdict"] != "not measured"]
    measured = [one for one in judged if not one["measured"].startswith("reckoned: ")]
    beside = [one["want"] for one in found["advice"] if one["measured"]]
    figure = f"{len(judged)} claims judged, {len(measured)} by what was measured; advice measured: {beside}"
    yield Line("no measured verdict on a busy machine", figure, not measured and not beside)
    try:
        from docs_pictures import browser

        with browser(SCREEN) as driver:
            driver.get(page.as_uri())
            height = driver.execute_script("return document.documentElement.scrollHeight")
            shown = driver.execute_script("return innerHeight")
    except Exception as error:
        yield Line("the report fits three screens", f"no browser: {error}"[:90], None, run=False)
        return
    figure = f"{height} px of {SCREENS} x {SCREEN[1]} (window {shown})"
    yield Line("the report fits three screens", figure, height <= SCREENS * SCREEN[1])


def cache() -> Path:
    return Path(os.environ.get("PAGETURNER_CACHE") or Path.home() / ".cache" / "pageturner")


def silence_lines() -> Iterator[Line]:
    """Other commands without a terminal."""
    with harness.server("--max-num-seqs", "4") as one:
        load = f"bench serve --base-url {one.url} --num-prompts 60 --input-len 100 --output-len 100"
        for what, words in (("bench serve", load), ("simulate", f"simulate {SIMULATION}")):
            with watched(command(*words.split()), ROOT, cache()) as (said, process):
                process.wait(900)
            silent, before = said.silence(said.lines[-1][0])
            figure = f"{silent:.1f} s of {said.lines[-1][0]:.0f} s, behind: {before[:60]}"
            good = silent <= SILENT_S and process.returncode == 0
            yield Line(f"{what}: longest silence, {SILENT_S:.0f} s at most", figure, good)


def lines(options: object) -> Iterator[Line]:
    yield from plan_lines()
    yield from generate_lines()
    with tempfile.TemporaryDirectory() as folder:
        yield from compare_lines(Path(folder))
    yield from silence_lines()


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
