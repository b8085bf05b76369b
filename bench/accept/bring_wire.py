"""What clients do on the wire, against a server and through a router: framing, heads and signs of life of streams,
line ends, byte order marks, pages of other origins, and fresh clients.

The cases are those of `PAGETURNER_CASES` whose kind is of the wire; NOT RUN where that is not set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line, NotRun  # noqa: E402

KINDS = re.compile(r"http/|streaming/|cors|BOM")
ORIGIN = "https://chat.example.com"
FLAGS = ("--tool-call-parser", "hermes", "--developer", "--allowed-origins", ORIGIN)
CLIENTS = ("openai", "anthropic", "ollama", "openai_npm")
BOM = b"\xef\xbb\xbf"
LONG = "the house by the sea " * 450  # tokens enough for some seconds of prefill
PATIENCE = 3.0  # seconds in which a head is there "at once": both processors may be busy
JDK = """
import java.net.URI;
import java.net.http.*;
class Ask {
  public static void main(String[] given) throws Exception {
    String body = "{\\"messages\\":[{\\"role\\":\\"user\\",\\"content\\":\\"hi\\"}],\\"max_tokens\\":1}";
    HttpClient client = HttpClient.newHttpClient();
    for (int i = 0; i < 5; i++) {
      HttpRequest request = HttpRequest.newBuilder(URI.create(given[0] + "/v1/chat/completions"))
        .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofString(body)).build();
      HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.statusCode() + (answer.body().contains("choices") ? " whole" : " " + answer.body()));
    }
  }
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wire-install", action="store_true", help="install clients that are not")


def exchanged(url: str, raw: bytes, seconds: float = 60.0) -> tuple[bytes, float]:
    """All that comes back until the connection is closed, and after how many seconds the first of it."""
    where, begin, first = urlsplit(url), time.monotonic(), 0.0
    parts = []
    with socket.create_connection((where.hostname or "", where.port or 0), seconds) as connection:
        connection.sendall(raw)
        while part := connection.recv(1 << 16):
            first = first or time.monotonic() - begin
            parts.append(part)
    return b"".join(parts), first


def bytes_of(request: dict[str, Any], raw: bytes | None = None) -> bytes:
    """A request of the table, on a connection of its own. raw: in place of its body."""
    headers = dict(request.get("headers", {}))
    version = headers.pop("(version)", "HTTP/1.1")
    content = raw
    if content is None:
        content = b"" if request["body"] is None else json.dumps(request["body"]).encode()
    ends = {"Connection": ", ".join(filter(None, [headers.pop("Connection", ""), "close"]))}
    sized = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
    }
    lines = [f"{name}: {value}" for name, value in (sized | headers | ends).items()]
    return (
        "\r\n".join([f"{request['method']} {request['path']} {version}", *lines, "", ""]).encode()
        + content
    )


def right(case: dict[str, Any], url: str) -> str:
    """ "" where a case has its right value here, else what it has."""
    kind, request, raw = case["kind"], dict(case["request"]), None
    if kind == "json/BOM":
        raw = BOM + b'{"prompt":"a","max_tokens":1}'
    if kind == "streaming/keep-alive":
        request["body"] = {
            **request["body"],
            "messages": [{"role": "user", "content": f"{urlsplit(url).port} {LONG}"}],
        }
        request["body"] |= (
            {"max_tokens": 2, "options": {"num_predict": 2}} if "api" in request["path"] else {}
        )
        request["body"].pop("max_tokens" if "/api/" in request["path"] else "options", None)
    told, first = exchanged(url, bytes_of(request, raw))
    head, _, body = told.decode().partition("\r\n\r\n")
    told_head = head.lower()
    good = head.startswith("HTTP/1.1 200")
    match kind:
        case "http/upgrade":
            good &= told.count(b"HTTP/1.1 ") == 1
        case "http/1.0":
            good &= "transfer-encoding" not in told_head and body.endswith("[DONE]\n\n")
        case "streaming/line separators":
            good &= len(body.split("\n")) == len(body.splitlines()) + 1
            good &= "\\u" in body
        case "streaming/proxy":
            good &= "x-accel-buffering: no" in told_head
        case "streaming/keep-alive":
            good &= first < PATIENCE and ("/api/" in request["path"] or ": keep-alive" in body)
        case "cors":
            good &= "access-control-allow-private-network: true" in told_head
    return "" if good else f"{case['id']}: first byte after {first:.1f} s, {told[:160]!r}"


def case_lines(urls: dict[str, str], rows: list[dict[str, Any]]) -> Iterator[Line]:
    for kind in sorted({row["kind"] for row in rows}):
        of_kind = [row for row in rows if row["kind"] == kind and row["kind"] != "batches/BOM"]
        if not of_kind:
            continue
        wrong = [why for name in urls for row in of_kind if (why := right(row, urls[name]))]
        figure = f"{len(of_kind) * len(urls) - len(wrong)} of {len(of_kind) * len(urls)} (server and router)"
        yield Line(f"cases of {kind}", "; ".join([figure, *wrong[:3]]), not wrong)


def batch_line(url: str) -> Line:
    """A file that an editor began with a byte order mark, through the server's batches."""
    lines = b"".join(
        json.dumps(
            {
                "custom_id": str(n),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "a", "max_tokens": 1},
            }
        ).encode()
        + b"\n"
        for n in range(3)
    )
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += (
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + BOM
        + lines
        + b"\r\n--b--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    request = {"method": "POST", "path": "/v1/files", "body": None, "headers": headers}
    file = json.loads(exchanged(url, bytes_of(request, form))[0].partition(b"\r\n\r\n")[2])
    wanted = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    made = exchanged(url, bytes_of({"method": "POST", "path": "/v1/batches", "body": wanted}))[0]
    id, told = json.loads(made.partition(b"\r\n\r\n")[2])["id"], {"status": ""}
    while told["status"] not in ("completed", "failed"):
        time.sleep(0.2)
        page = exchanged(
            url, bytes_of({"method": "GET", "path": f"/v1/batches/{id}", "body": None})
        )[0]
        told = json.loads(page.partition(b"\r\n\r\n")[2])
    counts = told["request_counts"]
    return Line("cases of batches/BOM", json.dumps(counts), counts["completed"] == 3)


def life_lines(urls: dict[str, str]) -> Iterator[Line]:
    """The first bytes of a long prompt's stream in each shape."""
    said = [{"role": "user", "content": LONG}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": LONG, "max_tokens": 2},
        "/v1/chat/completions": {"messages": said, "max_tokens": 2},
        "/v1/messages": {"model": "smollm2", "messages": said, "max_tokens": 2},
        "/v1/responses": {"input": LONG, "max_output_tokens": 2},
        "/api/chat": {"model": "smollm2", "messages": said, "options": {"num_predict": 2}},
    }
    wanted = {"/v1/messages": b"event: message_start", "/v1/responses": b"event: response.created"}
    for name, url in urls.items():
        told = {}
        for number, (path, body) in enumerate(bodies.items()):
            salted = json.loads(json.dumps(body).replace("the house", f"{name} {number} house", 1))
            asked = bytes_of({"method": "POST", "path": path, "body": salted | {"stream": True}})
            answer, first = exchanged(url, asked, 300.0)
            told[path] = (first, wanted.get(path, b"200 OK") in answer)
        figure = ", ".join(f"{path} {first:.2f} s" for path, (first, _) in told.items())
        good = all(there and first < PATIENCE for first, there in told.values())
        yield Line(f"head of a stream behind {len(LONG.split())} words, {name}", figure, good)


def jdk_line(urls: dict[str, str], folder: Path) -> Line:
    what = "java.net.http.HttpClient at its default version (it asks for h2c), 5 requests each"
    if shutil.which("java") is None:
        return Line(what, "there is no java", None, run=False)
    (folder / "Ask.java").write_text(JDK)
    told = {}
    for name, url in urls.items():
        command = ["java", str(folder / "Ask.java"), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        told[name] = done.stdout.split("\n")[:-1] or [done.stderr[-200:]]
    good = all(answers == ["200 whole"] * 5 for answers in told.values())
    figure = "; ".join(
        f"{name}: {', '.join(sorted(set(answers)))}" for name, answers in told.items()
    )
    return Line(what, figure, good)


def curl_line(urls: dict[str, str]) -> Line:
    what = "curl --http2 over plain HTTP, two requests on a connection"
    if shutil.which("curl") is None:
        return Line(what, "there is no curl", None, run=False)
    told = []
    for url in urls.values():
        place = f"{url}/v1/completions"
        words = [
            "curl",
            "-sS",
            "--http2",
            "-H",
            "content-type: application/json",
            "-d",
            '{"prompt":"a","max_tokens":1}',
        ]
        done = subprocess.run(
            [*words, "-w", " %{http_code}/%{num_connects}\n", place, place],
            capture_output=True,
            text=True,
            timeout=60,
        )
        told.append(re.findall(r" (\d+/\d)$", done.stdout, re.M))
    return Line(
        what,
        json.dumps(dict(zip(urls, told, strict=True))),
        all(one == ["200/1", "200/0"] for one in told),
    )


def client_lines(install: bool) -> Iterator[Line]:
    import api_clients

    options = argparse.Namespace(clients=list(CLIENTS), task_seconds=240.0, no_install=not install)
    yield from api_clients.lines(options)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield harness.pytest_line(
        "every odd framing of RFC 9112 and every form of smuggling, to a server and through a router",
        "tests/server/test_http_framing.py",
    )
    yield harness.pytest_line(
        "signs of life, one line of JSON, byte order marks: every shape",
        "tests/server/test_keep_alive.py",
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        one = stack.enter_context(harness.server(*FLAGS, "--batch-dir", str(folder / "batches")))
        port = harness.free_port()
        words = ["route", one.url, "--port", str(port), "--allowed-origins", ORIGIN]
        command = [sys.executable, "-m", "pageturner", *words]
        router = stack.enter_context(harness.running(command, port))
        urls = {"server": one.url, "router": router.url}
        yield jdk_line(urls, folder)
        yield curl_line(urls)
        yield from life_lines(urls)
        yield batch_line(one.url)
        if "PAGETURNER_CASES" in os.environ:
            text = (Path(os.environ["PAGETURNER_CASES"]) / "api.jsonl").read_text()
            rows = [json.loads(row) for row in text.split("\n") if row]
            yield from case_lines(urls, [row for row in rows if KINDS.search(row["kind"])])
        else:
            yield Line("cases of the wire", "PAGETURNER_CASES is not set", None, run=False)
    try:
        yield from client_lines(options.wire_install)
    except NotRun as reason:
        yield Line("fresh clients", str(reason), None, run=False)


if __name__ == "__main__":
    sys.exit(harness.main("bring_wire", __doc__, {"wire": harness.part("bring_wire")}))
