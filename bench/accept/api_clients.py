"""Real clients against one server, each in its own environment, each checked by a script of its own.

    python bench/accept/api_clients.py [--clients NAME ...] [--no-install]

Owns the servers, who runs in which order and how a script's line of JSON (bench/clients/seen.py) becomes a
line of the report. Must not know what a client checks, nor how it is installed (bench/clients/install.py).
What cannot be installed is NOT RUN.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import install
import tokenizer_folder
from command_line import NotInstalled, ended
from harness import RESULTS, Line, Server

from pageturner.config.settings import ServerConfig
from pageturner.formats import hub

SMOLLM2 = "smollm2-135m-instruct-q4_1.gguf"
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
FOLDER = RESULTS / "clients"
MODEL, SHORT = "qwen2.5-coder", "smollm2"
# The small model answers with JSON, bare or fenced, whatever its template asks for.
FLAGS = ("--served-model-name", MODEL, "--tool-call-parser", "json", "--log-level", "warning")
SHORT_FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--log-level", "warning")
# command lines that edit a file (command_line.py): module -> name
COMMAND_LINES = {"codex": "Codex", "claude_code": "Claude Code", "opencode": "opencode"}
# For these the small model is asked once; then a script says what solves the task, whatever model there is.
SCRIPTED_FLAGS = (
    "--served-model-name",
    MODEL,
    "--developer",
    "--tool-call-parser",
    "hermes",
    "--log-level",
    "warning",
)
LONGEST = 900.0  # seconds for one client
# Clients neither look for newer versions of themselves nor tell anybody that they run, and find no key.
QUIET = {
    "NO_COLOR": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONWARNINGS": "ignore",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients", nargs="*", choices=[*install.ENVIRONMENTS, *COMMAND_LINES], help="these alone"
    )
    parser.add_argument(
        "--task-seconds", type=float, default=240.0, help="for a command line and its task"
    )
    parser.add_argument(
        "--no-install", action="store_true", help="run only what is installed already"
    )


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """One line for each client, two for each command line."""
    wanted = arguments.clients or [*install.ENVIRONMENTS, *COMMAND_LINES]
    scripts = [name for name in wanted if name in install.ENVIRONMENTS]
    absent = {name: why for name in scripts if (why := _missing(name, not arguments.no_install))}
    for name, why in absent.items():
        yield Line(name, why, passed=None, run=False)
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer_folder.write(hub.cache_folder() / SMOLLM2, FOLDER / "tokenizer")
    commands = [name for name in wanted if name in COMMAND_LINES]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server("server.log", *FLAGS))
        short = stack.enter_context(
            harness.server(*SHORT_FLAGS, model=SHORT, log=FOLDER / "short.log")
        )
        for name in [name for name in scripts if name not in absent]:
            command = [
                *install.command(name),
                server.url,
                MODEL,
                short.url,
                SHORT,
                str(FOLDER / "tokenizer"),
            ]
            begin = time.monotonic()
            status, said, progress = run(command, FOLDER)
            (FOLDER / f"{name}.log").write_text(progress + said)
            yield line(name, status, said, progress, time.monotonic() - begin)
        for name in commands:
            yield command_line(name, server, arguments.task_seconds, scripted=False)
        restarts = sum(one.metric("pageturner:engine_restarts_total") for one in (server, short))
        yield Line("the servers behind them", f"{restarts:.0f} engines lost", restarts == 0)
    if commands:
        with _server("scripted.log", *SCRIPTED_FLAGS) as server:
            for name in commands:
                yield command_line(name, server, arguments.task_seconds, scripted=True)


def _server(log: str, *flags: str) -> contextlib.AbstractContextManager[Server]:
    """One of the larger small model, with batches where it has them."""
    if "batch_dir" in {field.name for field in dataclasses.fields(ServerConfig)}:
        flags += ("--batch-dir", str(FOLDER / "batches"))
    return harness.server(*flags, model=str(hub.cache_folder() / QWEN), log=FOLDER / log)


def command_line(name: str, server: Server, seconds: float, scripted: bool) -> Line:
    """What a command line did with its task: with the model as it is nothing may be refused, with a scripted
    one the file must also be changed as it was asked for."""
    what = f"{COMMAND_LINES[name]}, {'what the model says is scripted' if scripted else MODEL}"
    try:
        seen = importlib.import_module(name).run(
            install.folder(name), server.url, MODEL, seconds, scripted
        )
    except NotInstalled as why:
        return Line(what, f"cannot be installed: {why}", passed=None, run=False)
    asked = ", ".join(f"{count} {request}" for request, count in seen.requests.most_common(4))
    called = ", ".join(f"{count} {call}" for call, count in seen.calls.most_common(4)) or "none"
    figure = f"{seen.version}; {asked}; calls: {called}; {seen.results} results sent back"
    figure += (
        "; the file is as it should be" if seen.solved else "; the file is not as it should be"
    )
    figure += "" if not seen.errors else f"; refused: {'; '.join(seen.errors)[:300]}"
    return Line(what, figure, seen.protocol_held and (seen.solved or not scripted))


def _missing(name: str, may_install: bool) -> str:
    """Why a client is not there; "" where it is."""
    if install.installed(name):
        return ""
    if not may_install:
        return "not installed"
    try:
        install.install(name)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"cannot be installed: {error}"
    return ""


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a client. Whatever it has started ends with it."""
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")
    }
    how = {"cwd": folder, "env": environment | QUIET, "stderr": subprocess.PIPE}
    status, said, progress = ended(command, LONGEST, **how)
    if status is None:
        return -signal.SIGKILL, said, f"{progress}\nnot ready after {LONGEST:.0f} s"
    return status, said, progress


def line(name: str, status: int, said: str, progress: str, seconds: float) -> Line:
    """What a script said, as a line of the report."""
    seen = _seen(said)
    if seen is None:
        words = " ".join(" ".join(progress.strip().splitlines()[-3:]).split())
        return Line(
            name, f"its script ended with status {status} and no figures: {words[-300:]}", False
        )
    checks: dict[str, bool | str] = seen["checks"]
    wrong = {check: what for check, what in checks.items() if what is not True}
    figure = f"{len(checks) - len(wrong)} of {len(checks)} checks"
    figure += f" ({', '.join(check for check in checks if check not in wrong)})"
    figure += f"; {seen['figure']}" if seen.get("figure") else ""
    figure += f"; {seconds:.0f} s"
    figure += "".join(f"; {check}: {what}" for check, what in wrong.items())
    return Line(f"{seen['client']} {seen['version']}", figure, bool(checks) and not wrong)


def _seen(said: str) -> dict[str, Any] | None:
    """The last line of JSON in what a script said."""
    for text in reversed(said.splitlines()):
        with contextlib.suppress(ValueError):
            seen = json.loads(text)
            if isinstance(seen, dict) and "checks" in seen:
                return seen
    return None
