"""GGUF files, versions 2 and 3, read through mmap: metadata, tensor table, raw tensor bytes.

Owns the container format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Must not know
what any key or tensor means. Trusts nothing: whatever the bytes are, the outcome is a parse or an
EngineFault, and no memory is taken for a number that only the file claims. Arrays are decoded when
asked for, so that opening a file costs little more than walking over its strings once.

A model that llama.cpp has split lies in files NAME-00001-of-00002.gguf and so on: the first has the
metadata, each has tensors. Whichever is named, they are opened as one.

Codes: model_unreadable, gguf_magic, gguf_version, gguf_truncated, gguf_corrupt, gguf_metadata,
gguf_kind, shard_missing, tensor_missing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar, overload

from pageturner.errors import EngineFault, naming
from pageturner.formats.ggml_types import KINDS
from pageturner.formats.mapped import MappedTensors, TensorInfo, map_file

Scalar = int | float | bool | str
Value = TypeVar("Value", int, float, bool, str)

_STRING, _ARRAY = 8, 9
_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # value type -> struct code
_FIXED = {number: struct.Struct("<" + code) for number, code in _FORMATS.items()}
_WHOLE = [number for number, code in _FORMATS.items() if code in "BbHhIiQq"]
_U32, _U64 = _FIXED[4], _FIXED[10]
_SHORTEST_PAIR = 8 + 4 + 1  # an empty key, its type, a one-byte value
_SHORTEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, its type and offset
_MAX_DIMS = 4
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Array:
    """A metadata array that still lies in the file: `count` elements of one GGUF value type."""

    kind: int
    count: int
    offset: int
    data: mmap.mmap

    def __len__(self) -> int:
        return self.count

    def tolist(self) -> list[Scalar]:
        """The elements, decoded. EngineFault('gguf_corrupt') if a string is not UTF-8."""
        if self.kind == _STRING:
            return list(self.strings())
        return list(
            struct.unpack_from(f"<{self.count}{_FORMATS[self.kind]}", self.data, self.offset)
        )

    def integers(self) -> list[int]:
        """The elements of an array of whole numbers. EngineFault('gguf_metadata') if it is not
        one."""
        if self.kind not in _WHOLE:
            raise EngineFault(
                "gguf_metadata", "expected an array of whole numbers in the model file"
            )
        return [int(element) for element in self.tolist()]

    def floats(self) -> list[float]:
        """The elements of an array of numbers. EngineFault('gguf_metadata') if it is not one."""
        if self.kind == _STRING:
            raise EngineFault("gguf_metadata", "expected an array of numbers in the model file")
        return [float(element) for element in self.tolist()]

    def strings(self) -> list[str]:
        """The elements of an array of strings. EngineFault('gguf_metadata') if it is not one."""
        if self.kind != _STRING:
            raise EngineFault("gguf_metadata", "expected an array of strings in the model file")
        data, position, size = self.data, self.offset, _U64.unpack_from
        out = []
        try:
            for _ in range(self.count):
                start = position + 8
                position = start + size(data, position)[0]
                out.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise _corrupt("the model file holds a string that is not UTF-8") from error
        return out


class _ByteReader:
    """A position in the file that cannot leave it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0
        self.size = len(data)

    def skip(self, count: int) -> int:
        """Step over `count` bytes; where they started."""
        start = self.position
        if count > self.size - start:
            raise EngineFault(
                "gguf_truncated", f"the model file ends too early, at byte {self.size:,}"
            )
        self.position = start + count
        return start

    def fixed(self, form: struct.Struct) -> int | float | bool:
        value: int | float | bool = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def u32(self) -> int:
        return int(self.fixed(_U32))

    def u64(self) -> int:
        return int(self.fixed(_U64))

    def string(self) -> str:
        start = self.skip(self.u64())
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise _corrupt(f"the string at byte {start:,} is not UTF-8") from error

    def value(self, key: str) -> Scalar | Array:
        kind = self.u32()
        if kind in _FIXED:
            return self.fixed(_FIXED[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _corrupt(f"metadata key {key!r} has the unknown value type {kind}")
        return self.array(key)

    def array(self, key: str) -> Array:
        kind, count = self.u32(), self.u64()
        array = Array(kind, count, self.position, self.data)
        if kind in _FIXED:
            self.skip(count * _FIXED[kind].size)
        elif kind == _STRING:
            self.skip_strings(count)
        else:
            raise _corrupt(f"metadata key {key!r} is an array of the unsupported type {kind}")
        return array

    def skip_strings(self, count: int) -> None:
        """Written out, without calls: a vocabulary has a hundred thousand strings, and the start-up
        waits."""
        data, position, last, size = self.data, self.position, self.size - 8, _U64.unpack_from
        if count * 8 > self.size - position:
            self.skip(count * 8)  # raises
        for _ in range(count):
            if position > last:
                break
            position += 8 + size(data, position)[0]
        self.skip(position - self.position)


class GGUFFile(MappedTensors):
    """An open GGUF file.

    size      bytes of the file
    metadata  key -> scalar, or `Array`
    missing   names of the other files of a split model that are not there
    """

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.path = path
        self.size = len(data)
        self.missing: list[str] = []
        reader = _ByteReader(data)
        if data[:4] != b"GGUF":
            raise EngineFault("gguf_magic", f"{path} is not a GGUF file")
        reader.skip(4)
        _check_version(reader.u32(), path)
        tensor_count, pair_count = reader.u64(), reader.u64()
        if tensor_count * _SHORTEST_TENSOR + pair_count * _SHORTEST_PAIR > len(data):
            raise EngineFault(
                "gguf_truncated", f"{path} is too short for what its header announces"
            )
        self.metadata = _read_metadata(reader, pair_count)
        tensors = _read_tensors(reader, tensor_count, self.get("general.alignment", int, 32))
        super().__init__(path, tensors, dict.fromkeys(tensors, data))

    def number(self, count: int) -> Any:
        """Return which of so many files of a model it is by its metadata, from 0 on; None: it is
        none of so many."""
        if self.metadata.get("split.count") != count:
            return None
        return self.metadata.get("split.no")

    def join(self, part: GGUFFile) -> None:
        """Take the tensors of another part of the same model. EngineFault('gguf_corrupt') for one
        that is here already."""
        if twice := self.tensors.keys() & part.tensors.keys():
            raise _corrupt(f"tensor {min(twice)!r} lies in {part.path} too")
        self.tensors |= part.tensors
        self._data |= part._data

    @overload
    def get(self, key: str, kind: type[Value]) -> Value: ...
    @overload
    def get(self, key: str, kind: type[Value], default: Value) -> Value: ...
    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """A scalar. EngineFault('gguf_metadata') if it is of another type, or absent without a
        default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise EngineFault("gguf_metadata", f"{self.path} lacks the metadata key {key!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            message = f"{self.path}: metadata key {key!r} should be of type {kind.__name__}"
            raise EngineFault("gguf_metadata", message)
        return value

    def array(self, key: str) -> Array:
        """An array. EngineFault('gguf_metadata') if it is absent or a scalar."""
        value = self.metadata.get(key)
        if not isinstance(value, Array):
            raise EngineFault("gguf_metadata", f"{self.path} lacks the metadata array {key!r}")
        return value


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map and parse a GGUF file, or all files of a split model. EngineFault for anything that is
    not a sound one."""
    file = open_header(path, _check_ranges)
    if file.missing:
        raise _incomplete(file)
    return file


def _incomplete(file: GGUFFile) -> EngineFault:
    names = f"{file.missing[0]} ({len(file.missing)} of its files)"
    message = f"{file.path} is one part of a model, and {names} is not beside it"
    return EngineFault("shard_missing", f"{message}: fetch or copy the whole model")


def parts_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a model of which one is named, by its name: of a split model all of them."""
    path = Path(path)
    name = _PART.fullmatch(path.name)
    if name is None and path.is_symlink():
        path = path.resolve()
        name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name[2])
    return [path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def model_name(path: Path) -> str:
    """The name of a model after its file; the parts of a split one share it."""
    return _PART.sub(r"\1.gguf", path.name).removesuffix(path.suffix)


def open_header(
    path: str | os.PathLike[str], check: Callable[[GGUFFile], None] = lambda file: None
) -> GGUFFile:
    """The metadata and the tensor table, of a file that may end behind them: `tensor` is not for
    use. check: called with each file of the model."""
    file = _open_part(path, check)
    count = file.get("split.count", int, 1)
    if count < 2:
        return file
    paths = parts_of(path)
    if len(paths) != count:
        message = f"{file.path} says that it is one of {count} files; their names should end in"
        raise EngineFault("gguf_corrupt", f"{message} -00001-of-{count:05}.gguf and so on")
    parts: dict[Any, GGUFFile] = {}
    missing = [part.name for part in paths if not part.is_file()]
    for place in paths:
        if place.name in missing:
            continue
        part = _open_part(place, check)
        number = part.number(count)
        if number not in range(count) or number in parts:
            message = f"{place} is not the part of this model that its name says"
            raise EngineFault("gguf_corrupt", f"{message}: fetch or copy it again")
        parts[number] = part
    first = parts.pop(0, file)
    first.missing = missing
    if first is file:
        raise _incomplete(file)
    for part in parts.values():
        with _damage(first.path):
            first.join(part)
    return first


def _open_part(path: str | os.PathLike[str], check: Callable[[GGUFFile], None]) -> GGUFFile:
    name = os.fspath(path)
    data = map_file(name, EngineFault("gguf_magic", f"{name} is not a GGUF file"), 4)
    with _damage(name):
        part = GGUFFile(data, name)
        check(part)
    return part


_DAMAGED = {
    "gguf_truncated": "truncated: fetch or copy it again",
    "gguf_corrupt": "damaged: fetch or copy it again",
}


@contextlib.contextmanager
def _damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Faults raised within name the file, and say what to do with a broken one."""
    name = os.fspath(path)
    with naming(name):
        try:
            yield
        except EngineFault as fault:
            if fault.code not in _DAMAGED:
                raise
            raise EngineFault(
                fault.code, f"{name} is {_DAMAGED[fault.code]} ({fault.message})"
            ) from fault


def _corrupt(message: str) -> EngineFault:
    return EngineFault("gguf_corrupt", message)


def _check_version(version: int, path: str) -> None:
    if version in (2, 3):
        return
    if version and not version & 0xFFFF:
        raise EngineFault(
            "gguf_version", f"{path} is big-endian GGUF; only little-endian is supported"
        )
    raise EngineFault(
        "gguf_version", f"{path} is GGUF version {version}; versions 2 and 3 are supported"
    )


def _read_metadata(reader: _ByteReader, count: int) -> dict[str, Scalar | Array]:
    metadata: dict[str, Scalar | Array] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise _corrupt(f"metadata key {key!r} occurs twice")
        metadata[key] = reader.value(key)
    return metadata


def _read_tensors(reader: _ByteReader, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table."""
    if alignment < 8 or alignment & (alignment - 1):
        raise _corrupt(f"alignment {alignment} is not a power of two of at least 8")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _read_tensor(reader, alignment)
        if info.name in tensors:
            raise _corrupt(f"tensor {info.name!r} occurs twice")
        tensors[info.name] = info
    base = -(-reader.position // alignment) * alignment
    return {name: replace(info, offset=base + info.offset) for name, info in tensors.items()}


def _check_ranges(file: GGUFFile) -> None:
    """Every tensor lies within the file, and none in another."""
    end = 0
    for info in sorted(file.tensors.values(), key=lambda info: info.offset):
        if info.offset < end:
            raise _corrupt(f"tensor {info.name!r} overlaps another one")
        end = info.offset + info.nbytes
        if end > file.size:
            raise EngineFault("gguf_truncated", f"the model file ends inside tensor {info.name!r}")


def _read_tensor(reader: _ByteReader, alignment: int) -> TensorInfo:
    """One row of the table, its offset still relative to the data section."""
    name = reader.string()
    dims = reader.u32()
    if not 1 <= dims <= _MAX_DIMS:
        raise _corrupt(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([reader.u64() for _ in range(dims)]))
    number, offset = reader.u32(), reader.u64()
    kind = KINDS.get(number)
    if kind is None:
        message = f"tensor {name!r} is of the unknown type {number}: get the model in another one, such as"
        raise EngineFault("gguf_kind", f"{message} Q8_0 or Q4_K_M")
    if 0 in shape or shape[-1] % kind.values:
        raise _corrupt(f"tensor {name!r} of type {kind.name} has the bad shape {shape}")
    if offset % alignment:
        raise _corrupt(f"tensor {name!r} is not aligned to {alignment} bytes")
    return TensorInfo(name, kind.name, shape, offset, prod(shape) // kind.values * kind.nbytes)
