"""`pageturner pull`, `list` and `rm`: the models that are kept on this machine.

Owns what is shown of them and what may be removed. How an alias is fetched is the affair of
formats/hub.py, how an id of the hub is fetched that of `huggingface_hub`; here its files are held
against the hashes that the hub gave for them. A model elsewhere on the disk is no affair of these
commands: they neither list nor remove it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pageturner.errors import EngineFault, bad_setting
from pageturner.formats import hub
from pageturner.progress import Progress

_MB = 1_000_000
# how the hub's cache calls a large file; small ones have a hash of git
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model in one of the two caches. kind: "alias" or "hub". used: seconds since 1970. remove:
    takes its files off the disk."""

    name: str
    kind: str
    nbytes: int
    used: float
    remove: Callable[[], None]


def kept() -> list[KeptModel]:
    """Return the models that are kept on disk, the last used first."""
    found = []
    for alias, source in hub.ALIASES.items():
        path = hub.cache_folder() / source.filename
        if path.is_file():
            status = path.stat()
            used = max(status.st_atime, status.st_mtime)
            found.append(KeptModel(alias, "alias", status.st_size, used, path.unlink))
    return sorted([*found, *_of_the_hub()], key=lambda model: -model.used)


def _of_the_hub() -> list[KeptModel]:
    import huggingface_hub as hf  # deliberately late: it costs a third of a second

    try:
        cache = hf.scan_cache_dir()
    except hf.CacheNotFound:
        return []
    return [
        KeptModel(
            repo.repo_id,
            "hub",
            repo.size_on_disk,
            repo.last_accessed,
            cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute,
        )
        for repo in cache.repos
        if repo.repo_type == "model"
    ]


def check(path: Path) -> int:
    """Hash every file of a fetched folder whose hash the hub gave; returns how many there were.

    EngineFault('model_hash_mismatch'): the file is removed, so that the next attempt fetches it
    again.
    """
    blobs = (
        sorted({file.resolve() for file in path.rglob("*") if file.is_symlink()})
        if path.is_dir()
        else []
    )
    known = [blob for blob in blobs if _SHA256.fullmatch(blob.name) and blob.is_file()]
    with Progress("checking (MB)", sum(blob.stat().st_size for blob in known) // _MB) as progress:
        done = 0
        for blob in known:
            digest = hashlib.sha256()
            with blob.open("rb") as file:
                while chunk := file.read(4 * _MB):
                    digest.update(chunk)
                    done += len(chunk)
                    progress.update(done // _MB)
            if digest.hexdigest() != blob.name:
                blob.unlink()
                message = f"a file of {path} has another sha256 than the hub says, and was removed"
                raise EngineFault("model_hash_mismatch", f"{message}: run pageturner pull again")
    return len(known)


def room(reference: str) -> None:
    """EngineFault('disk_full') where what is to be fetched of an id of the hub does not fit the
    disk."""
    import huggingface_hub as hf

    try:
        files = hf.snapshot_download(reference, allow_patterns=hub.WANTED, dry_run=True)
    except (
        Exception
    ):  # whatever is wrong with the hub or the id is said by the download, in its own words
        return
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    folder = Path(hf.constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    if needed > (free := shutil.disk_usage(folder).free):
        message = f"{reference!r} needs {needed / _MB:,.0f} MB more, and {folder} has {free / _MB:,.0f} MB free"
        raise EngineFault(
            "disk_full", f"{message}: make room (pageturner rm), or set HF_HOME to another disk"
        )


def size(nbytes: int) -> str:
    """Format a number of bytes as `list` shows it."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def day(seconds: float) -> str:
    """A time as `list` shows it, in the time zone of the machine."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def remove(name: str, *, yes: bool, ask: Callable[[str], str] = input) -> bool:
    """Take a model off the disk; False if the answer to the question was no."""
    name = hub.HUB_ALIASES.get(name, name)
    models = {model.name: model for model in kept()}
    if name not in models:
        there = f"there are: {', '.join(models)}" if models else "there are none"
        where = " (a file elsewhere is yours to remove)" if os.path.exists(name) else ""
        raise EngineFault("model_not_found", f"no model {name!r} is kept here{where}; {there}")
    model = models[name]
    if not yes:
        try:
            answer = ask(f"remove {name} ({size(model.nbytes)})? [y/N] ")
        except EOFError:
            raise bad_setting(
                "there is no terminal to ask on: add --yes to remove without a question",
            ) from None
        if answer.strip().lower() not in ("y", "yes"):
            return False
    try:
        model.remove()
    except OSError as error:
        raise EngineFault("model_not_removed", f"cannot remove {name!r}: {error}") from error
    return True
