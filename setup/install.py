"""Installs this checkout into an environment, and says at every moment what it does.

    python3 setup/install.py .venv [--isas native|all]

Packages are fetched while the kernels compile. The tools of the build lie in build/tools and not in the environment,
so that what was compiled is kept. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "build" / "tools"
EVERY_S = 2.5  # from one line to the next where there is no terminal
MEMORY_EACH = 450_000_000  # bytes that a compiler takes
TERMINAL = sys.stdout.isatty()


class Step:
    """A command that runs, and what it does just now."""

    def __init__(self, what: str, command: list[str], packages: int = 0) -> None:
        self.what = what
        self.note = ""
        self._packages = packages
        self._found = 0
        self._begin = time.monotonic()
        self._last: deque[str] = deque(maxlen=40)
        path = f"{TOOLS / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(TOOLS), "PYTHONUNBUFFERED": "1"}
        own["CMAKE_BUILD_PARALLEL_LEVEL"] = str(compilers())
        environment = {**os.environ, **own}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._last.append(line)
                self._note(line)

    def _note(self, line: str) -> None:
        if found := re.match(r"pageturner: (.*?)( \(\d+ s\))?$", line):
            self.note = found[1]
        elif found := re.match(r"(?:Collecting|Processing) (?:\S*/)?([\w.]+)", line):
            self._found += 1
            number = f"{self._found} of {self._packages}, " if self._packages else ""
            self.note = f"{number}{found[1]}"
        elif line.startswith("Installing collected"):
            self.note = "unpacking"

    def __str__(self) -> str:
        note = f": {self.note}" if self.note else ""
        return f"{self.what}{note} ({time.monotonic() - self._begin:.0f} s)"

    def end(self) -> None:
        """Say that it is done; exit with its last words where it failed."""
        self._reader.join(5)
        if self.process.returncode:
            say(f"{self} FAILED\n{''.join(self._last)}")
            sys.exit(1)
        say(f"{self.what}: done in {time.monotonic() - self._begin:.0f} s")


def compilers() -> int:
    """Return how many run at once: some more than cores, for a share of a busy machine, and no more than
    there is memory for."""
    cores = os.cpu_count() or 1
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return cores
    found = re.search(r"MemAvailable: *(\d+) kB", meminfo)
    free = int(found[1]) * 1024 if found else 0
    return max(1, min(max(6, cores), free // MEMORY_EACH))


def say(text: str, stays: bool = True) -> None:
    if TERMINAL:
        width = shutil.get_terminal_size().columns - 1
        shown = text if stays else text[:width]
        print(f"\r\033[K{shown}", end="\n" if stays else "", flush=True)
    elif stays:
        print(text, flush=True)


def run(*steps: Step) -> None:
    """Wait for steps that run side by side."""
    waiting = list(steps)
    spoken = time.monotonic()
    try:
        while waiting:
            for step in [one for one in waiting if one.process.poll() is not None]:
                waiting.remove(step)
                step.end()
                spoken = time.monotonic()
            now = time.monotonic()
            due = not TERMINAL and now - spoken >= EVERY_S
            if waiting and (TERMINAL or due):
                spoken = now
                say(" | ".join(map(str, waiting)), stays=due)
            time.sleep(0.2 if TERMINAL else 0.05)
    finally:
        for step in waiting:
            step.process.terminate()


def bundled_pip() -> Path | None:
    """The folder with Python's own wheel of pip, where this interpreter's pip can work for another one.

    To make an environment with a pip takes seconds in which nothing else can be done: so it gets that wheel
    beside all else.
    """
    found = find_spec("ensurepip")
    try:
        told = re.findall(r"\d+", version("pip"))
    except PackageNotFoundError:
        return None
    if found is None or found.origin is None or tuple(map(int, told[:2])) < (22, 3):
        return None
    folder = Path(found.origin).parent / "_bundled"
    return folder if any(folder.glob("pip-*.whl")) else None


def main() -> None:
    """Make the environment if there is none, then install packages and kernels side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--isas", default="native", help="native: this processor's best one; all")
    parser.add_argument("--again", action="store_true", help="compile the kernels alone")
    arguments = parser.parse_args()
    python = str(arguments.environment.absolute() / "bin" / "python")
    whole = (arguments.environment / "bin" / "pip").exists()
    bundled = None if whole else bundled_pip()
    if not whole:
        without = ["--without-pip"] if bundled else []
        command = [sys.executable, "-m", "venv", *without, str(arguments.environment)]
        run(Step("making .venv", command))
    pip = [sys.executable, "-m", "pip", "--python", python] if bundled else [python, "-m", "pip"]
    pip += ["install", "--disable-pip-version-check", "--progress-bar", "off"]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    needed += [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    own = ["--no-deps", "--no-build-isolation", "--editable", "."]
    settings = ["--config-settings", f"cmake.define.PAGETURNER_ISAS={arguments.isas}"]
    if arguments.again:
        own.append("--force-reinstall")
    pinned = len(re.findall(r"^\S+==", (ROOT / "requirements.txt").read_text(), re.M))
    packages = [*pip, "--require-hashes", "-r", "requirements.txt"]
    held = TOOLS / "needed.txt"
    if not held.exists() or held.read_text() != " ".join(needed):
        shutil.rmtree(TOOLS, ignore_errors=True)
        run(Step("fetching the build tools", [*pip, "--target", str(TOOLS), *needed]))
        held.write_text(" ".join(needed))
    steps = [Step("kernels", [*pip, *settings, *own])]
    if not arguments.again:
        steps.append(Step("packages", packages, pinned))
    if bundled:
        from_there = ["--no-index", "--no-compile", "--find-links", str(bundled)]
        steps.append(Step("pip", [*pip, *from_there, "pip"]))
    run(*steps)


if __name__ == "__main__":
    main()
