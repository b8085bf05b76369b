"""An aarch64 Python under qemu with a wheel in it: `python bench/wheels/emulate.py WHEEL SCRIPT [ARGUMENTS]`.

Owns the folder of Debian's Python for that machine, unpacked and not installed, and what pip fetches for it.
Needs Debian's package tools, qemu-user and the network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent)]

import contents
from contents import ROOT

WORK = ROOT / "build" / "wheels"
SYSTEM = WORK / "aarch64-system"
LIBRARY = re.compile(r"^(lib(?!perl)|zlib1g$|python3\.\d+-minimal$)")
LIBC = 2, 17  # the first glibc of aarch64


class Missing(Exception):
    """Something that is not installed."""


def _apt(*words: str, cwd: Path) -> str:
    """What apt answers about packages of the other machine, with lists of its own: nothing here changes."""
    lists = WORK / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (lists / folder).mkdir(parents=True, exist_ok=True)
    (lists / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State::Lists": lists / "lists",
        "Dir::State::status": lists / "status",
        "Dir::Cache": lists / "cache",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    done = subprocess.run([words[0], *options, *words[1:]], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{' '.join(words[:2])}: {done.stderr.strip()[-300:]}")
    return done.stdout


def python() -> Path:
    """The aarch64 Python of this Debian, unpacked once. Missing where that cannot be."""
    absent = [
        tool for tool in ("qemu-aarch64", "apt-get", "apt-cache", "dpkg") if not shutil.which(tool)
    ]
    if absent:
        raise Missing(f"{', '.join(absent)} not found (qemu-user, and Debian)")
    if not (SYSTEM / ".ready").exists():
        packages = WORK / "aarch64-packages"
        packages.mkdir(parents=True, exist_ok=True)
        _apt("apt-get", "update", cwd=packages)
        minimal = re.findall(
            r"python3\.\d+-minimal", _apt("apt-cache", "depends", "python3-minimal", cwd=packages)
        )
        wanted = [minimal[0], f"lib{minimal[0].replace('-minimal', '-stdlib')}", "libstdc++6"]
        only = [
            f"--no-{kind}"
            for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        ]
        every = _apt("apt-cache", "depends", "--recurse", *only, *wanted, cwd=packages)
        names = sorted({name for name in every.splitlines() if LIBRARY.match(name)})
        _apt("apt-get", "download", *names, cwd=packages)
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, SYSTEM], check=True)
        (SYSTEM / ".ready").touch()
    return next((SYSTEM / "usr" / "bin").glob("python3.*"))


def install(wheel: Path, interpreter: Path) -> Path:
    """The folder of a wheel and of all that it needs, for that Python."""
    minor = interpreter.name.removeprefix("python3.")
    folder = WORK / f"aarch64-site-3.{minor}"
    newest = int(platform.libc_ver()[1].split(".")[1])  # of the same Debian
    names = [f"manylinux_{LIBC[0]}_{n}_aarch64" for n in range(newest, LIBC[1] - 1, -1)]
    platforms = [
        word for name in (*names, "manylinux2014_aarch64") for word in ("--platform", name)
    ]
    abis = [word for abi in (f"cp3{minor}", "abi3", "none") for word in ("--abi", abi)]
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--target",
            folder,
            "--only-binary=:all:",
            "--implementation",
            "cp",
            "--python-version",
            f"3.{minor}",
            *platforms,
            *abis,
            wheel,
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Missing(f"pip: {done.stderr.strip()[-500:]}")
    return folder


def run(interpreter: Path, site: Path, *arguments: str | Path) -> str:
    """What that Python prints. RuntimeError with what it said when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        "qemu-aarch64",
        "-cpu",
        "max",
        "-L",
        str(SYSTEM),
        str(interpreter),
        *map(str, arguments),
    ]
    done = subprocess.run(command, env=environment, cwd=WORK, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return done.stdout


def fits(wheel: Path, interpreter: Path) -> bool:
    """Whether a wheel is for that Python."""
    tag, minor = contents.tag_of(wheel), int(interpreter.name.removeprefix("python3."))
    return tag.machine == "aarch64" and (tag.python <= minor if tag.stable else tag.python == minor)


def main(arguments: Sequence[str]) -> int:
    """Run a script with this wheel."""
    interpreter = python()
    print(run(interpreter, install(Path(arguments[0]), interpreter), *arguments[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
