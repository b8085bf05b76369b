"""What clients do on the wire, against a server and through a router: the head of a stream behind a long prompt,
Java's client, curl, and fresh clients. Framing, line ends, byte order marks and signs of life of every shape are held
by tests/server/test_http_framing.py and tests/server/test_keep_alive.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import Line, NotRun

CLIENTS = ("openai", "anthropic", "ollama", "openai_npm")
LONG = "the house by the sea " * 450  # tokens enough for some seconds of prefill
PATIENCE = 3.0  # seconds in which a head is there "at once": both processors may be busy
SAID = [{"role": "user", "content": LONG}]
# The streams of each shape: path, body, what their first lines have.
STREAMS = (
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}, b""),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2}, b""),
    ("/v1/messages", {"messages": SAID, "max_tokens": 2}, b"event: message_start"),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2}, b"event: response.created"),
    ("/api/chat", {"messages": SAID, "options": {"num_predict": 2}}, b""),
)
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


def life_lines(urls: dict[str, str]) -> Iterator[Line]:
    """The heads of a long prompt's stream in each shape."""
    for name, url in urls.items():
        firsts, good = {}, True
        for number, (path, body, begins) in enumerate(STREAMS):
            own = json.dumps(body).replace("the house", f"{name} {number} house", 1)
            asked = harness.request(
                url, path, {"model": "smollm2", **json.loads(own), "stream": True}
            )
            begin = time.monotonic()
            with urllib.request.urlopen(asked, timeout=300) as answer:
                firsts[path] = time.monotonic() - begin
                good &= begins in answer.read() and firsts[path] < PATIENCE
        figure = ", ".join(f"{path} {first:.2f} s" for path, first in firsts.items())
        yield Line(f"head of a stream behind {len(LONG.split())} words, {name}", figure, good)


def said_by(program: str, *command: str) -> str:
    """What a program prints. NotRun where it is not there."""
    if shutil.which(program) is None:
        raise NotRun(f"there is no {program}")
    done = harness.ran(program, *command, timeout=120)
    return done.stdout or done.stderr[-200:]


def jdk_line(urls: dict[str, str]) -> Iterator[Line]:
    what = "java.net.http.HttpClient at its default version (it asks for h2c), 5 requests each"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "Ask.java")
        source.write_text(JDK)
        told = {name: said_by("java", str(source), url).splitlines() for name, url in urls.items()}
    good = all(answers == ["200 whole"] * 5 for answers in told.values())
    each = (f"{name}: {', '.join(sorted(set(answers)))}" for name, answers in told.items())
    yield Line(what, "; ".join(each), good)


def curl_line(urls: dict[str, str]) -> Iterator[Line]:
    words = ["-sS", "--http2", "-H", "content-type: application/json"]
    words += ["-d", '{"prompt":"a","max_tokens":1}', "-w", " %{http_code}/%{num_connects}\n"]
    told = {}
    for url in urls.values():
        said = said_by("curl", *words, *[f"{url}/v1/completions"] * 2)
        told[url] = re.findall(r" (\d+/\d)$", said, re.M)
    good = all(one == ["200/1", "200/0"] for one in told.values())
    yield Line("curl --http2 over plain HTTP, two requests on a connection", json.dumps(told), good)


def client_lines(install: bool) -> Iterator[Line]:
    import api_clients

    options = argparse.Namespace(clients=list(CLIENTS), task_seconds=240.0, no_install=not install)
    yield from api_clients.lines(options)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(harness.server())
        router = stack.enter_context(harness.router(one.url))
        urls = {"server": one.url, "router": router.url}
        yield from harness.safely("java.net.http.HttpClient", lambda: jdk_line(urls))
        yield from harness.safely("curl --http2", lambda: curl_line(urls))
        yield from life_lines(urls)
    yield from harness.safely("fresh clients", lambda: client_lines(options.wire_install))


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
