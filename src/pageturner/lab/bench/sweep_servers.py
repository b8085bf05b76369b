"""The servers of a sweep: those that are there, and our own ones, started for it and ended with it.

Owns their processes, their names of models and their keys. Must not know what they are asked.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pageturner.errors import EngineFault, bad_setting
from pageturner.http.http_client import ConnectionLost, parse_address
from pageturner.lab.bench.client import get
from pageturner.lab.bench.sweep import SweptServer

KEY = "PAGETURNER_SWEEP_KEY_"  # environment variables that begin so hold the keys of servers
START_SECONDS = 300.0
ANSWER_SECONDS = 30.0


def named(words: Sequence[str], flag: str, what: str) -> dict[str, str]:
    """{NAME: what stands behind its =}. EngineFault for what is not written so, or has a name
    twice."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        if not equals or not name.strip() or not name.isprintable():
            raise bad_setting(f"{flag} is given as NAME={what}, not {word!r}")
        if name in found:
            raise bad_setting(f"{flag} has the name {name!r} twice")
        found[name] = rest
    return found


def key_of(name: str) -> str:
    """The key of a server, from the environment; empty if there is none."""
    return os.environ.get(key_variable(name), "")


def key_variable(name: str) -> str:
    """The environment variable with the key of a server."""
    return KEY + re.sub(r"\W", "_", name).upper()


def _page(server: SweptServer, path: str) -> tuple[int, bytes]:
    address = parse_address(server.url, "--server")
    return asyncio.run(get(address, path, key_of(server.name), ANSWER_SECONDS))


def ask_models(server: SweptServer) -> None:
    """Note which model it serves and how long a request may be, if it says so and that is not known
    yet. EngineFault('no_answer') where nobody answers."""
    try:
        status, body = _page(server, "/v1/models")
    except ConnectionLost as error:
        raise EngineFault("no_answer", f"{server.url}: {error}") from error
    if status in (401, 403):
        raise EngineFault("no_answer", f"it wants a key: set {key_variable(server.name)}")
    try:
        first: dict[str, Any] = msgspec.json.decode(body)["data"][0]
        server.model = server.model or str(first["id"])
        server.context = int(first.get("max_model_len") or 0)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        if not server.model:
            told = f"it does not say which model it serves (HTTP {status} for /v1/models)"
            raise EngineFault("no_answer", f"{told}: give --ask {server.name}=MODEL") from error


@contextmanager
def own_server(server: SweptServer, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Our own server of this model with the flags in `server.started`, ended at the end. Its
    address is in `server.url`. EngineFault('no_server') with its last words if it does not
    start."""
    words = shlex.split(server.started or "")
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "serve",
        model,
        "--port",
        "0",
        "--developer",
        *words,
        "--log-level",
        "info",
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            # a session of its own: Ctrl-C is for the sweep, which ends it when it has written its
            # results
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        try:
            server.url = _address(server, process, log)
            yield process
        finally:
            _end(process)


def _address(server: SweptServer, process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the server listens at, once it is ready."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        found = re.search(r"listening on (\S+?);", log.read_text(errors="replace"))
        if found:
            server.url = found[1]
            if _healthy(server):
                return found[1]
        if process.poll() is not None:
            said = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise EngineFault("no_server", f"our server {server.name} did not start: {said}")
        time.sleep(0.05)
    raise EngineFault(
        "no_server", f"our server {server.name} was not ready within {START_SECONDS:.0f} s"
    )


def _healthy(server: SweptServer) -> bool:
    try:
        status, _ = _page(server, "/health")
        return status == 200
    except ConnectionLost:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second ends it at once
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
        return
