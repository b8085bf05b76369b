"""Two sides of a comparison: this checkout, and one of an earlier commit with an environment of its own.

Owns how the earlier commit is installed and how the commands and servers of a side are started. Must not know
what is compared. The package had another layout at earlier commits: a side is asked by its command line, its
HTTP API, and scripts that try the old module names when the new ones are absent.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import ROOT, NotRun

BASE = "405d642"  # the last commit before the smaller house


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout that is installed in a virtual environment, whose Python is `python`."""

    name: str
    root: Path
    python: Path

    def command(self, *words: str) -> list[str]:
        """`pageturner WORDS` of this side."""
        return [str(self.python), "-m", "pageturner", *words]

    def environment(self, **more: str) -> dict[str, str]:
        """Our environment, in which nothing of another side can be imported."""
        return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | more

    def run(self, *words: str, **environment: str) -> str:
        """The standard output of a command of this side. RuntimeError when the command fails."""
        done = harness.ran(*words, cwd=self.root, env=self.environment(**environment))
        if done.returncode:
            said = done.stderr.strip()[-300:]
            raise RuntimeError(f"{self.name}: {' '.join(map(str, words))[:200]}: {said}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and the id of its API process."""

    host: str
    port: int
    pid: int


def ours() -> Side:
    """This checkout."""
    return Side("ours", ROOT, Path(sys.executable))


def earlier(base: str) -> Side:
    """The side of `base`: a checkout that has its .venv, or a commit, which is installed once below build/base
    (a few minutes). NotRun when there is no such commit, or its environment runs other code."""
    given = Path(base)
    folder = given if given.is_dir() else ROOT / "build" / "base" / base
    python = folder / ".venv" / "bin" / "python"
    if not given.is_dir() and not (folder / ".venv" / ".core").exists():
        _install(base, folder)
    if not python.exists():
        raise NotRun(f"{python} is absent: --base names a commit, or a checkout with its .venv")
    side = Side("base", folder.resolve(), python.absolute())
    where = side.run(str(side.python), "-c", "import pageturner; print(pageturner.__file__)")
    if side.root not in Path(where.strip()).resolve().parents:
        raise NotRun(f"{python} does not run the code of {folder}: {where.strip()}")
    return side


def _install(commit: str, folder: Path) -> None:
    """Clone this repository at the commit, and install it there."""
    print(f"          (installing {commit} in {folder.relative_to(ROOT)}, once)", flush=True)
    if not (folder / ".git").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder)]
        subprocess.run(clone, check=True)
    side = Side("base", folder, Path(sys.executable))
    try:
        side.run("git", "checkout", "--quiet", "--detach", commit)
        side.run("make", ".venv/.core", f"PYTHON={sys.executable}")
    except RuntimeError as error:
        raise NotRun(f"{commit} could not be installed, give --base FOLDER: {error}") from error


@contextmanager
def serving(side: Side, *flags: str, wait: float = 120.0, **environment: str) -> Iterator[Address]:
    """`pageturner serve smollm2` of a side on a free loopback port, ready; ended by its process id."""
    port = harness.free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            side.command("serve", "smollm2", "--port", str(port), "--speculation", "off", *flags),
            cwd=side.root,
            env=side.environment(**environment),
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            harness.wait_ready(f"http://127.0.0.1:{port}", process, wait)
            yield Address("127.0.0.1", port, process.pid)
        except (RuntimeError, TimeoutError) as error:
            log.seek(0)
            said = re.sub(r"\s+", " ", log.read()[-400:])
            raise RuntimeError(f"{side.name}: {error}; it said: {said}") from error
        finally:
            if process.poll() is None:
                harness.end(process)
