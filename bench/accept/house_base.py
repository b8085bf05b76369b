"""The house as it was: commit 8cc2ebe with a virtual environment of its own, and servers of either side.

Owns how the old commit is got and how a side's commands are started. Must not know what is compared.
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

COMMIT = "8cc2ebe"
FOLDER = ROOT / "build" / "house" / COMMIT


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout that is installed in a virtual environment. python: of that environment."""

    name: str
    root: Path
    python: Path

    def command(self, *words: str) -> list[str]:
        """`pageturner WORDS` of this side."""
        return [str(self.python), "-m", "pageturner", *words]

    def environment(self, **more: str) -> dict[str, str]:
        """As ours, but nothing of another side can be imported."""
        return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | more


def ours() -> Side:
    return Side("ours", ROOT, Path(sys.executable))


def base(given: Path | None) -> Side:
    """The old commit: `given`, a checkout with .venv in it, or else one below build/, made where it is not
    there yet (a few minutes). NotRun if the commit is not to be had."""
    folder = given or FOLDER
    if given is None and not (FOLDER / ".venv" / ".core").exists():
        _make()
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        raise NotRun(
            f"{python} is absent: --base names a checkout of {COMMIT} with its virtual environment"
        )
    side = Side("base", folder, python)
    where = subprocess.run(
        [python, "-c", "import pageturner; print(pageturner.__file__)"],
        cwd=folder,
        env=side.environment(),
        capture_output=True,
        text=True,
    )
    if not where.stdout.startswith(str(folder.resolve())) and not where.stdout.startswith(
        str(folder)
    ):
        raise NotRun(
            f"{python} does not run the code of {folder}: {(where.stdout + where.stderr).strip()}"
        )
    return side


def _make() -> None:
    """Clone this repository at the commit, and install it there."""
    print(f"          (installing {COMMIT} in {FOLDER.relative_to(ROOT)}, once)", flush=True)
    if not (FOLDER / ".git").exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(FOLDER)]
        subprocess.run(clone, check=True)
    done = subprocess.run(["git", "checkout", "--quiet", "--detach", COMMIT], cwd=FOLDER)
    if done.returncode:
        raise NotRun(
            f"this clone of the repository has no commit {COMMIT}: fetch its history, or give --base"
        )
    command = ["make", ".venv/.core", f"PYTHON={sys.executable}"]
    made = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, env=ours().environment()
    )
    if made.returncode:
        raise NotRun(f"{COMMIT} could not be installed: {made.stderr.strip()[-300:]}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and its process."""

    host: str
    port: int
    pid: int


@contextmanager
def serving(side: Side, *flags: str, wait: float = 120.0, **environment: str) -> Iterator[Address]:
    """`pageturner serve` of this side on a free loopback port, ready; ended by its process id."""
    port = harness.free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            side.command("serve", "smollm2", "--port", str(port), *flags),
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
