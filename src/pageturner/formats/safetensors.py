"""Safetensors files read through mmap: one file, or the shards of a folder that an index joins.

Owns the container format (https://github.com/huggingface/safetensors). Must not know what any
tensor means. Trusts nothing: whatever the bytes are, the outcome is a parse or an EngineFault.

Codes: model_unreadable, safetensors_corrupt, safetensors_truncated, shard_missing, tensor_missing,
weights_missing, weight_kind.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.hf_config import parse_json, read_bounded
from pageturner.formats.mapped import Data, MappedTensors, TensorInfo, map_file

# Bytes of one element. The float types are called as in GGML; others are here to be refused by
# name.
_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "I8", "U8"), 1),
}
AGAIN = "fetch or copy the model again"
CONVERT = (
    'Where Transformers and PyTorch are installed, this converts it: python -c "from transformers import'
    " AutoModelForCausalLM as M; M.from_pretrained('{0}', torch_dtype='auto').save_pretrained('{0}')\""
)
# Bytes of a header and of an index: 250,000 tensors. The format would allow a header of 100 MB,
# which takes gigabytes once it is parsed.
_LONGEST_HEADER = 32 << 20
_MAX_DIMS, _MAX_SHARDS = 8, 1000


class Safetensors(MappedTensors):
    """The tensors of one or several files, as one. Their kind is the type's name in the format."""

    def __init__(self, path: str, files: Mapping[str, Data], names: dict[str, str] | None) -> None:
        """`files`: by name; `names`: tensor -> file, as an index has it, None: whatever the files
        hold."""
        tensors: dict[str, TensorInfo] = {}
        where: dict[str, Data] = {}
        for file, data in files.items():
            for name, info in _read_header(data, f"{path}/{file}").items():
                if name in tensors:
                    raise _corrupt(f"tensor {name!r} occurs twice in {path}")
                tensors[name] = info
                where[name] = data
        for name, file in (names or {}).items():
            if where.get(name) is not files[file]:
                message = f"{path}/{file} lacks the tensor {name!r}, which the index of the shards says it holds"
                raise EngineFault("tensor_missing", f"{message}: {AGAIN}")
        super().__init__(path, tensors, where)


def open_safetensors(folder: str | os.PathLike[str]) -> Safetensors:
    """The weights of a Hugging Face folder: `model.safetensors`, or an index and its shards.
    EngineFault 'weights_missing', 'shard_missing' or one of this module's others."""
    root = Path(folder)
    index = _only(root, "model.safetensors.index.json", "*.safetensors.index.json")
    if index.is_file():
        names = _read_index(index)
        shards = sorted(set(names.values()))
        missing = [shard for shard in shards if not (root / shard).is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            message = f"{root} lacks {len(missing)} of {len(shards)} shards of its weights"
            raise EngineFault(
                "shard_missing", f"{message}: {', '.join(missing[:3])}{more}: {AGAIN}"
            )
        return Safetensors(str(root), {shard: _map(root / shard) for shard in shards}, names)
    single = _only(root, "model.safetensors", "*.safetensors")
    if single.is_file():
        return Safetensors(str(root), {single.name: _map(single)}, None)
    found = sorted(
        p.name for p in root.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors")
    )
    hint = f": {AGAIN}"
    if found:
        hint = f", only {', '.join(found[:3])}, which is not read. {CONVERT.format(root)}"
    raise EngineFault(
        "weights_missing", f"{root} holds no model.safetensors and no index of shards{hint}"
    )


def _only(root: Path, usual: str, pattern: str) -> Path:
    """The file of the usual name, or the only one that could stand for it: old GPTQ folders name
    theirs after the quantisation."""
    others = list(root.glob(pattern))
    if len(others) == 1 and not (root / usual).is_file():
        return others[0]
    return root / usual


def _corrupt(message: str) -> EngineFault:
    return EngineFault("safetensors_corrupt", message)


def _read_index(path: Path) -> dict[str, str]:
    try:
        names = parse_json(read_bounded(path, _LONGEST_HEADER), _unique)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(f"{path} is not an index of shards: {error!r}") from error
    if not isinstance(names, dict) or not all(_is_file_name(name) for name in names.values()):
        raise _corrupt(
            f"{path}: weight_map should name, for each tensor, a file in the same folder"
        )
    if (shards := len(set(names.values()))) > _MAX_SHARDS:
        raise _corrupt(f"{path} names {shards:,} files, more than are opened")
    return names


def _is_file_name(name: object) -> bool:
    """Return whether a name can only be a file of the folder itself: no path, and nothing a file
    system refuses."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not {"/", "\0"} & {*name}
        and len(name.encode()) < 256
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. The format forbids to say something twice: readers would
    differ."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} occurs twice")
        found[name] = value
    return found


def _map(path: Path) -> Data:
    return map_file(path, EngineFault("safetensors_truncated", f"{path} is empty: {AGAIN}"))


def _read_header(data: Data, file: str) -> dict[str, TensorInfo]:
    """The tensor table, every range checked against the file and against the others."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(_LONGEST_HEADER, len(data) - 8):
        raise _corrupt(f"{file} is no safetensors file, or truncated: {AGAIN}")
    try:
        header = parse_json(data[8 : 8 + length], _unique)
        rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
        tensors = [_tensor(name, row, 8 + length, file) for name, row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(f"{file} has a broken header: {error!r}") from error
    end = 8 + length
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise _corrupt(f"{file}: tensor {info.name!r} overlaps another one")
        end = info.offset + info.nbytes
        if end > len(data):
            message = f"{file} is truncated, it ends inside tensor {info.name!r}: {AGAIN}"
            raise EngineFault("safetensors_truncated", message)
    return {info.name: info for info in tensors}


def _tensor(name: str, row: dict[str, Any], base: int, file: str) -> TensorInfo:
    """One row of the header. ValueError and the like for nonsense."""
    kind, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    if kind not in _SIZES:
        message = f"{file}: tensor {name!r} is of the unknown type {kind!r}: use F32, F16 or BF16"
        raise EngineFault("weight_kind", message)
    if len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has the bad shape {shape}")
    if end - begin != prod(shape) * _SIZES[kind]:
        raise ValueError(
            f"tensor {name!r} of type {kind} and shape {shape} takes {end - begin} bytes"
        )
    return TensorInfo(name, kind, shape, base + begin, end - begin)
