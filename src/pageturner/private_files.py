"""Files that nobody but their owner may read: every file that a program of ours leaves behind is
made here.

Owns their modes (0600, folders 0700), what is done about one that is there already with another
mode or owner, and how a file is replaced as a whole. Must not know what is in them. Each error is
an OSError whose `strerror` is a sentence. Imports little.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from pageturner import logs

FILE = 0o600
FOLDER = 0o700
OTHERS = 0o077  # what these modes leave out
Source = str | os.PathLike[str]


class NotPrivate(OSError):
    """A file or folder belongs to somebody else, who could read or replace it."""

    def __init__(self, path: Source, owner: int) -> None:
        message = f"it belongs to another user (uid {owner}): name another path, or remove it"
        super().__init__(errno.EACCES, message, os.fspath(path))


def open_private(path: Source, flags: int = os.O_RDWR) -> int:
    """Open a file, which is made where it is missing. One that others may use is tightened, with a
    warning; NotPrivate for one of another user. A device or a pipe is opened as it is."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        _tighten(path, fd, FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def own_folder(path: Source) -> None:
    """Make a folder that is ours alone, or see to it that one that is there is."""
    os.makedirs(path, FOLDER, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _tighten(path, fd, FOLDER)
    finally:
        os.close(fd)


def _tighten(path: Source, fd: int, mode: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return
    if found.st_uid != os.geteuid():
        raise NotPrivate(path, found.st_uid)
    if found.st_mode & OTHERS:
        os.fchmod(fd, mode)
        was = stat.S_IMODE(found.st_mode)
        logs.say(
            f"{path} was open to others (mode {was:04o}): it has mode {mode:04o} now", "warning"
        )


@contextlib.contextmanager
def locked(path: Source, how: int) -> Iterator[int]:
    """Hold the lock of this file, which is made where it is missing. how: as flock takes it. Yields
    the open file; the kernel frees the lock when the process ends, however it ends."""
    import fcntl

    os.makedirs(os.path.dirname(path) or ".", FOLDER, exist_ok=True)
    fd = open_private(path)
    try:
        fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)


def write_private(path: Source, pieces: Iterable[bytes], *, durable: bool = False) -> int:
    """Write a file that is there whole or not at all, and return its size. An OSError, as ENOSPC,
    leaves what was there before. durable: it is on the disk when this returns."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a terminal, a pipe
        return target.write_bytes(b"".join(pieces))
    target.parent.mkdir(FOLDER, parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    size = 0
    try:
        with os.fdopen(open_private(partial, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            for piece in pieces:
                size += file.write(piece)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(target.parent)
    return size


def write_json(path: Source, value: object) -> None:
    """Write a value as indented JSON, whole or not at all."""
    import msgspec

    write_private(path, [msgspec.json.format(msgspec.json.encode(value), indent=2)])


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that renames in it are durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
