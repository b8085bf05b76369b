"""Safetensors files read through mmap: one file, or the shards of a folder that an index joins.

Owns the container format (https://github.com/huggingface/safetensors). Must not know what any tensor means.
Trusts nothing: whatever the bytes are, the outcome is a parse or an EngineFault.

Codes: model_unreadable, safetensors_corrupt, safetensors_truncated, shard_missing, tensor_missing.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from math import prod
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.files.gguf import TensorInfo

# Bytes of one element. The float types are called as in GGML; others are here to be refused by name.
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit


class Safetensors:
    """The tensors of one or several files, as one. Tensor bytes stay in the page cache.

    tensors  name -> TensorInfo (kind: the type's name in the format; offset: in its file)
    """

    def __init__(self, path: str, files: dict[str, mmap.mmap], names: dict[str, str] | None) -> None:
        """`names`: tensor -> file, as an index has it; None: whatever the files hold."""
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._data: dict[str, mmap.mmap] = {}
        for file, data in files.items():
            for name, info in _read_header(data, file).items():
                if name in self.tensors:
                    raise EngineFault("safetensors_corrupt", f"tensor {name!r} occurs twice in {path}")
                self.tensors[name] = info
                self._data[name] = data
        for name in names or {}:
            if name not in self.tensors:
                message = f"{path}: the index announces the tensor {name!r}, which no shard holds"
                raise EngineFault("tensor_missing", message)

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """(kind, shape, raw bytes) of a tensor, not copied. EngineFault('tensor_missing') if absent."""
        info = self.tensors.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{self.path} lacks the tensor {name!r}")
        return info.kind, info.shape, memoryview(self._data[name])[info.offset : info.offset + info.nbytes]


def open_safetensors(folder: str | os.PathLike[str]) -> Safetensors:
    """The weights of a Hugging Face folder: `model.safetensors`, or an index and its shards.
    EngineFault 'weights_missing', 'shard_missing' or one of this module's others."""
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        names = _read_index(index)
        shards = sorted(set(names.values()))
        missing = [shard for shard in shards if not (root / shard).is_file()]
        if missing:
            message = f"{root} lacks {len(missing)} of {len(shards)} shards of its weights: {missing[0]}"
            raise EngineFault("shard_missing", message)
        return Safetensors(str(root), {shard: _map(root / shard) for shard in shards}, names)
    single = root / "model.safetensors"
    if single.is_file():
        return Safetensors(str(root), {single.name: _map(single)}, None)
    found = sorted(p.name for p in root.glob("*") if p.suffix in (".bin", ".pt", ".safetensors"))
    hint = f" (found {', '.join(found[:3])}: only model.safetensors is read)" if found else ""
    raise EngineFault("weights_missing", f"{root} holds no model.safetensors and no index of shards{hint}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFault("safetensors_corrupt", f"{path} is not an index of shards: {error!r}") from error
    if not isinstance(names, dict) or not all(isinstance(v, str) and "/" not in v for v in names.values()):
        raise EngineFault("safetensors_corrupt", f"{path}: weight_map should name a file for each tensor")
    return names


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise EngineFault("model_unreadable", f"cannot read {path}: {error}") from error


def _read_header(data: mmap.mmap, file: str) -> dict[str, TensorInfo]:
    """The tensor table, every range checked against the file and against the others."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(_LONGEST_HEADER, len(data) - 8):
        raise EngineFault("safetensors_corrupt", f"{file} is not a safetensors file, or is cut off")
    try:
        header = json.loads(data[8 : 8 + length])
        rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
        tensors = [_tensor(name, row, 8 + length) for name, row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineFault("safetensors_corrupt", f"{file} has a broken header: {error!r}") from error
    end = 8 + length
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise EngineFault("safetensors_corrupt", f"{file}: tensor {info.name!r} overlaps another one")
        end = info.offset + info.nbytes
        if end > len(data):
            raise EngineFault("safetensors_truncated", f"{file} ends inside tensor {info.name!r}")
    return {info.name: info for info in tensors}


def _tensor(name: str, row: dict[str, Any], base: int) -> TensorInfo:
    """One row of the header. ValueError and the like for nonsense."""
    kind, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    if kind not in _SIZES:
        raise ValueError(f"tensor {name!r} is of the unknown type {kind!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has the bad shape {shape}")
    if end - begin != prod(shape) * _SIZES[kind]:
        raise ValueError(f"tensor {name!r} of type {kind} and shape {shape} takes {end - begin} bytes")
    return TensorInfo(name, kind, shape, base + begin, end - begin)
