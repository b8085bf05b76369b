"""What a port answers before there is a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from pageturner.http import lifecycle
from pageturner.progress import Still
from pageturner.server.waiting_room import waiting_room


def test_programs_and_browsers_are_told_what_is_fetched() -> None:
    with lifecycle.bind("127.0.0.1", 0) as listener:
        url = lifecycle.url_of(listener)
        with waiting_room(listener), Still(lambda: "fetching <org/name>: 3 of 9 MB"):
            answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": []})
            page = httpx.get(url, headers={"accept": "text/html"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["reason"]) == (503, 503, "loading")
        assert error["message"] == "the server starts: fetching <org/name>: 3 of 9 MB"
        assert answer.headers["retry-after"] == "2"
        assert page.status_code == 503
        assert "fetching &lt;org/name&gt;: 3 of 9 MB" in page.text
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            listener.setblocking(True)
            accepted, _ = listener.accept()  # the server has it, and nobody else
            with accepted:
                assert accepted.recv(100).startswith(b"GET /")


def test_a_client_that_says_nothing_holds_up_nobody_for_long() -> None:
    with (
        lifecycle.bind("127.0.0.1", 0) as listener,
        waiting_room(listener),
        socket.create_connection(listener.getsockname()),
    ):
        assert httpx.get(lifecycle.url_of(listener), timeout=60).status_code == 503


def test_serve_says_on_its_port_that_it_fetches(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub, socket.create_server(("", 0)) as probe:
        silent = f"http://127.0.0.1:{hub.getsockname()[1]}"  # takes what is asked, and says nothing
        port = probe.getsockname()[1]
        probe.close()
        environment = os.environ | {"HF_ENDPOINT": silent, "HF_HOME": str(tmp_path)}
        words = ["serve", "some-org/some-model", "--port", str(port)]
        command = [sys.executable, "-m", "pageturner", *words]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                said = ""
                deadline = time.monotonic() + 120
                while "fetching some-org/some-model" not in said and time.monotonic() < deadline:
                    time.sleep(0.05)
                    try:
                        said = httpx.get(f"http://127.0.0.1:{port}/health").text
                    except httpx.TransportError:
                        assert process.poll() is None
                assert "fetching some-org/some-model: 0 MB so far" in said
            finally:
                process.kill()
