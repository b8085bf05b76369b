"""What the three command lines have in common: a folder to install into, a task, and what was seen of it.

Each of them (codex.py, claude_code.py, opencode.py) has `run(folder, server, model, seconds, scripted)`, and
runs alone:

    python bench/clients/codex.py FOLDER http://127.0.0.1:8000 MODEL

With `--scripted` the model says what solves the task, whatever model it is, so that the whole way from a text
to a changed file is gone; the server must have been started with `--developer` and read calls as `hermes`.

Must not know any of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recorder import Recorder, Script, recording

END = "<|im_end|>"  # of an answer, for models of the format of a scripted one
FILE, BEFORE, AFTER = "greeting.py", 'print("hello")\n', 'print("goodbye")\n'
TASK = (
    f"The file {FILE} in the current directory prints hello. Edit the file so that it prints goodbye "
    "instead. Use your tools to do it, then stop."
)


class NotInstalled(Exception):
    """The client could not be had; the message says why."""


@dataclass(slots=True)
class Seen:
    """What a client did with the task.

    version   of the client
    requests  "METHOD PATH STATUS" -> how many
    errors    what the server said where it refused
    calls     name of a tool -> how often the model called it
    results   results of calls that the client sent back
    changed   whether the file is another one now, solved whether it is as it was asked for
    status    exit status of the client; None: it was ended after its time
    output    the end of what it printed
    """

    version: str
    requests: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    results: int = 0
    changed: bool = False
    solved: bool = False
    status: int | None = None
    output: str = ""

    @property
    def protocol_held(self) -> bool:
        """Whether it asked the model at all, and nothing that it asked was refused."""
        asked = any(
            request.startswith("POST") and request.endswith(" 200") for request in self.requests
        )
        return asked and not self.errors


Start = Callable[
    [Path, str], tuple[list[str], dict[str, str]]
]  # (home, url) -> command, environment


def installed(folder: Path, package: str, program: str, seconds: float = 300.0) -> Path:
    """The program of a package of npm in this folder; it is installed where it is not there."""
    path = folder / "node_modules" / ".bin" / program
    if not path.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise NotInstalled("there is no npm")
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotInstalled(f"npm install {package} took more than {seconds:.0f} s") from None
        if done.returncode or not path.exists():
            raise NotInstalled(f"npm install {package}: {done.stderr.strip()[-300:]}")
    return path


def version_of(program: Path) -> str:
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def call(name: str, **arguments: Any) -> str:
    """An answer that is a call, for a script."""
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>{END}"


def seen_by(
    program: Path,
    folder: Path,
    server: str,
    start: Start,
    seconds: float,
    texts: Sequence[str] = (),
) -> Seen:
    """Have a client do the task in a home and a workplace of its own, within so many seconds. texts: what the
    model says, turn by turn."""
    home, work = folder / "home", folder / "work"
    for place in (home, work):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    (work / FILE).write_text(BEFORE)
    seen = Seen(version_of(program))
    with recording(server, Script(server, texts)) as recorder:
        command, more = start(home, recorder.url)
        environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "TERM": "dumb",
            "NO_COLOR": "1",
            **more,
        }
        how = {"cwd": work, "env": environment, "stderr": subprocess.STDOUT}
        seen.status, output, _ = ended(command, seconds, **how)
        seen.output = output[-3000:]
        _count(seen, recorder)
    told = (work / FILE).read_text() if (work / FILE).exists() else ""
    seen.changed, seen.solved = told != BEFORE, told == AFTER
    return seen


def ended(command: list[str], seconds: float, **how: Any) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of a command; None: it was ended after so many seconds, with its children."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **how,
    )
    try:
        said, more = process.communicate(timeout=seconds)
        return process.returncode, said, more or ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, more = process.communicate()
        return None, said, more or ""


def _count(seen: Seen, recorder: Recorder) -> None:
    last = 0
    for one in recorder.exchanges:
        seen.requests[f"{one.method} {one.path} {one.status}"] += 1
        seen.calls.update(one.calls())
        if (error := one.error()) and one.path.startswith("/v1/"):
            seen.errors.append(f"{one.method} {one.path}: {one.status} {error}")
        text = one.request.decode("utf-8", "replace")
        told = (
            text.count('_call_output"') + text.count('"tool_result"') + text.count('"role":"tool"')
        )
        last = max(last, told)
    seen.results = last


def main(run: Callable[[Path, str, str, float, bool], Seen]) -> int:
    """Print what one client did. Status 0: the protocol held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("server", help="its address, http://HOST:PORT")
    parser.add_argument("model", help="the name that the server gives it")
    parser.add_argument("--seconds", type=float, default=600.0, help="most time for the task")
    parser.add_argument(
        "--scripted", action="store_true", help="the model says what solves the task"
    )
    given = parser.parse_args()
    seen = run(given.folder.resolve(), given.server, given.model, given.seconds, given.scripted)
    for name in (
        "version",
        "requests",
        "errors",
        "calls",
        "results",
        "changed",
        "solved",
        "status",
    ):
        print(f"{name}: {getattr(seen, name)}")
    print(seen.output)
    return 0 if seen.protocol_held else 1
