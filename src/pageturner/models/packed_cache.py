"""Packed weights on disk (`--packed-cache FOLDER`): the next start reads them instead of packing
anew.

Owns the file: what it depends on, how it is written and checked. Must not know layouts of backends:
these write and read the bytes (`WeightStore`). A file that is not what it should be is never an
error: it is packed anew, and replaced.

    magic, offset and length of the index, blake2b of the index   64 bytes
    weights, each aligned to 64 bytes, as the backend wrote them
    index   JSON: what the file depends on; for each weight its name, what it takes to read it, its
            checksum

A file is written under another name, flushed and then renamed: a start that is killed leaves none
by half.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pageturner.errors import EngineFault
from pageturner.formats.model_hash import model_marks
from pageturner.kernels.base import Ops, Weight
from pageturner.private_files import own_folder

FORMAT = 2  # another number whenever what is packed from the same tensors changes and no fingerprint tells
_MAGIC = b"PGTPACK1"
_HEAD = struct.Struct("<8sQQ32s")
_ALIGNMENT = 64
_LONGEST_INDEX = 64 << 20


@runtime_checkable
class WeightStore(Protocol):
    """A backend whose packed matrices can be kept in files."""

    def store_weight(self, weight: Weight, fd: int, offset: int) -> tuple[list[Any], int]:
        """Write its bytes. What `fetch_weight` needs, as JSON, and a checksum. OSError."""

    def fetch_weight(self, about: list[Any], fd: int, offset: int) -> tuple[Weight, int]:
        """The weight and its checksum. OSError where it is not there; ValueError for nonsense."""


class Stored(NamedTuple):
    """A weight of the file, and the GGML kind that it was packed from."""

    weight: Weight
    kind: str


@dataclass(slots=True)
class _Row:
    """One weight of an index."""

    kind: str
    shape: tuple[int, int]
    about: list[Any]
    offset: int
    nbytes: int
    checksum: int


class PackedCache:
    """The file of one model and one set of settings.

    settings  whatever else the packed bytes depend on, in JSON's types
    """

    def __init__(self, folder: Path, model: Path, ops: Ops, settings: dict[str, Any]) -> None:
        if not isinstance(ops, WeightStore):
            raise EngineFault(
                "packed_cache",
                f"--packed-cache needs the native backend, not the {ops.name} one: leave it away",
            )
        self._ops: WeightStore = ops
        self._source = str(model.resolve())
        marks = [list(mark) for mark in model_marks(model)]
        self._key = {
            "format": FORMAT,
            "source": self._source,
            "marks": marks,
            "backend": ops.fingerprint,
            **settings,
        }
        digest = hashlib.blake2b(json.dumps(self._key).encode(), digest_size=8).hexdigest()
        self._folder, self._stem = folder, model.stem
        self.path = folder / f"{model.stem}-{digest}.packed"
        self._rows: dict[str, _Row] = {}
        self._fd = -1
        self._fresh: dict[
            str, tuple[str, Weight]
        ] = {}  # what goes into the file that is written at the end
        self._missed = False
        self._open()

    @property
    def filled(self) -> bool:
        """Return whether there is a file to read from."""
        return bool(self._rows)

    def take(self, name: str) -> Stored | None:
        """The weight of this name; None where it must be packed."""
        row = self._rows.get(name)
        if row is None:
            return None
        try:
            weight, checksum = self._ops.fetch_weight(row.about, self._fd, row.offset)
            sound = checksum == row.checksum and tuple(weight.shape) == row.shape
        except (OSError, ValueError, TypeError):
            sound = False
        if not sound:
            warnings.warn(
                f"{self.path} is damaged at {name}: packed anew", RuntimeWarning, stacklevel=2
            )
            return None
        self._fresh[name] = (row.kind, weight)
        return Stored(weight, row.kind)

    def add(self, name: str, kind: str, weight: Weight) -> None:
        """A weight that was packed: the file lacked it."""
        self._missed = True
        self._fresh[name] = (kind, weight)

    def close(self) -> None:
        """Nothing more is taken."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._fresh = {}

    def keep(self) -> None:
        """Everything is loaded: write the file if it lacked anything. Nobody is hurt if that
        fails."""
        fresh = self._fresh
        if not self._missed or not fresh:
            return
        try:
            own_folder(self._folder)
            self._write(fresh)
            self._remove_stale()
        except OSError as error:
            message = (
                f"the packed weights could not be kept in {self._folder}: {error.strerror or error}"
            )
            warnings.warn(
                f"{message}: the next start packs them again", RuntimeWarning, stacklevel=2
            )

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        if self._fd < 0:
            return
        index = _read_index(self._fd)
        if index is None or index.get("key") != self._key:
            warnings.warn(
                f"{self.path} is damaged: its weights are packed anew", RuntimeWarning, stacklevel=3
            )
            return
        with contextlib.suppress(TypeError, ValueError, KeyError):
            size = os.fstat(self._fd).st_size
            rows = {
                name: _Row(kind, (shape[0], shape[1]), about, offset, nbytes, checksum)
                for name, kind, shape, about, offset, nbytes, checksum in index["weights"]
            }
            self._rows = {
                name: row for name, row in rows.items() if row.offset + row.nbytes <= size
            }

    def _write(self, fresh: dict[str, tuple[str, Weight]]) -> None:
        needed = sum(weight.nbytes for _, weight in fresh.values())
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize < needed:
            raise OSError(None, f"{needed / 1e9:.1f} GB are needed, and less is free there")
        fd, partial = tempfile.mkstemp(prefix=f"{self._stem}-", suffix=".partial", dir=self._folder)
        try:
            rows, offset = [], _ALIGNMENT
            for name, (kind, weight) in fresh.items():
                about, checksum = self._ops.store_weight(weight, fd, offset)
                rows.append(
                    [name, kind, list(weight.shape), about, offset, weight.nbytes, checksum]
                )
                offset += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
            index = json.dumps({"key": self._key, "weights": rows}).encode()
            os.pwrite(fd, index, offset)
            digest = hashlib.blake2b(index, digest_size=32).digest()
            os.pwrite(fd, _HEAD.pack(_MAGIC, offset, len(index), digest), 0)
            os.fsync(fd)
            os.replace(partial, self.path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _remove_stale(self) -> None:
        """Files of the same model as it was before it changed: nobody will ask for them again."""
        for other in self._folder.glob(f"{self._stem}-*.packed"):
            if other == self.path:
                continue
            with contextlib.suppress(OSError), open(other, "rb") as opened:
                key = (_read_index(opened.fileno()) or {}).get("key", {})
                if key.get("source") == self._source and key.get("marks") != self._key["marks"]:
                    other.unlink()


def _read_index(fd: int) -> dict[str, Any] | None:
    """The index of a file; None where there is no sound one."""
    try:
        magic, offset, length, digest = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        if magic != _MAGIC or length > _LONGEST_INDEX or offset >= 1 << 62:
            return None
        raw = os.pread(fd, length, offset)
        if hashlib.blake2b(raw, digest_size=32).digest() != digest:
            return None
        index = json.loads(raw)
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    return index if isinstance(index, dict) and isinstance(index.get("key"), dict) else None
