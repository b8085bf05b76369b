"""Installs clients, each into an environment of its own outside the repository.

    python bench/clients/install.py [NAME ...]          (all without names; what is complete is left alone)

They go to ${PAGETURNER_CLIENTS:-~/.cache/pageturner/clients}/NAME; remove such a folder to install it anew.
Owns which packages a client is, with their versions (environments.json). Must not know what is done with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What one client needs. script: beside this file. without: packages that are installed alone,
    because their own requirements are gigabytes of CUDA; inference-perf asks for Python 3.12 too, of which
    it uses nothing."""

    script: str
    packages: Sequence[str]
    without: Sequence[str] = ()
    npm: bool = False


TORCH = (
    "torch==2.13.0"  # there is a CPU build of it; a newer one would bring gigabytes of CUDA along
)
_ROWS = json.loads(Path(__file__).with_name("environments.json").read_text())
ENVIRONMENTS = {name: Environment(**row) for name, row in _ROWS.items()}


def folder(name: str) -> Path:
    """Where a client is, or would be."""
    home = os.environ.get("PAGETURNER_CLIENTS") or Path.home() / ".cache" / "pageturner" / "clients"
    return Path(home) / name


def installed(name: str) -> bool:
    """Whether it is there in the versions named here."""
    done = folder(name) / "complete"
    return done.is_file() and done.read_text() == _wanted(name)


def command(name: str) -> list[str]:
    """What runs its script, without arguments."""
    environment = ENVIRONMENTS[name]
    script = str(Path(__file__).parent / environment.script)
    if environment.npm:
        return ["node", script, str(folder(name))]
    words = [str(folder(name) / "bin" / "python"), script]
    return [*words, name] if environment.script == "benchmarks.py" else words


def install(name: str) -> None:
    """Make its environment. Raises RuntimeError with the last words of pip or npm."""
    if installed(name):
        return
    environment, target = ENVIRONMENTS[name], folder(name)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if environment.npm:
        (target / "package.json").write_text('{"private": true}')
        _run(
            [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(target),
                *environment.packages,
            ]
        )
    else:
        _run([sys.executable, "-m", "venv", str(target)])
        (target / "constraints.txt").write_text(TORCH)
        pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--constraint", str(target / "constraints.txt")]
        _run([*pip, *environment.packages])
        if environment.without:
            _run([*pip, "--no-deps", *environment.without])
    (target / "complete").write_text(_wanted(name))


def _wanted(name: str) -> str:
    return "\n".join((*ENVIRONMENTS[name].packages, *ENVIRONMENTS[name].without))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError as error:
        raise RuntimeError(f"{error.filename} is not there") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(command[:4])}: {' '.join(said[-2:])[:300]}")


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or ENVIRONMENTS:
        print(f"== {name}: {folder(name)}", flush=True)
        try:
            install(name)
        except RuntimeError as error:
            failed += 1
            print(f"   {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
