"""Writes small GGUF files, sound ones and, piece by piece, unsound ones. For tests only."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from pageturner.formats.gguf import Array, open_gguf
from pageturner.models.spec import ModelSpec

Value = str | bool | int | float | list[str] | list[int] | list[float]
Tensor = tuple[int, tuple[int, ...], bytes]  # GGML type number, shape with the columns last, data
ALIGNMENT = 32
# field of a layer -> llama.cpp's name
NAMES: dict[str, str] = json.loads(Path(__file__).with_name("gguf_names.json").read_bytes())
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(value: str | bool | int | float) -> tuple[int, bytes]:
    """(GGUF value type, bytes)."""
    if isinstance(value, str):
        return 8, string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    return 6, struct.pack("<f", value)


def pair(key: str, value: Value) -> bytes:
    """One metadata entry."""
    if not isinstance(value, list):
        number, raw = scalar(value)
        return string(key) + struct.pack("<I", number) + raw
    if value and all(
        type(element) is int for element in value
    ):  # readers ask for this type by name
        return string(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    kinds = {scalar(element)[0] for element in value} or {4}
    assert len(kinds) == 1
    head = struct.pack("<IIQ", 9, kinds.pop(), len(value))
    return string(key) + head + b"".join(scalar(element)[1] for element in value)


def tensor_row(name: str, number: int, shape: tuple[int, ...], offset: int) -> bytes:
    """One row of the tensor table."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dims + struct.pack("<IQ", number, offset)


def header(version: int, tensors: int, pairs: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % ALIGNMENT)


def gguf_bytes(metadata: dict[str, Value], tensors: dict[str, Tensor], version: int = 3) -> bytes:
    """A sound file."""
    table, data = b"", b""
    for name, (number, shape, raw) in tensors.items():
        table += tensor_row(name, number, shape, len(data))
        data += padded(raw)
    pairs = b"".join(pair(key, value) for key, value in metadata.items())
    return padded(header(version, len(tensors), len(metadata)) + pairs + table) + data


def sizes_of(spec: ModelSpec) -> dict[str, Value]:
    """The sizes that the keys of most architectures say."""
    return {
        "block_count": spec.layers,
        "context_length": spec.context,
        "embedding_length": spec.dim,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
    }


def of_arch(arch: str, keys: dict[str, Value]) -> dict[str, Value]:
    """The metadata of a model of this architecture, whose keys begin with its name."""
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}


def in_floats(arch: str, keys: dict[str, Value], values: dict[str, np.ndarray]) -> bytes:
    """A file of a model whose tensors are all F32."""
    tensors: dict[str, Tensor] = {
        name: (0, x.shape, np.ascontiguousarray(x, np.float32).tobytes())
        for name, x in values.items()
    }
    return gguf_bytes(of_arch(arch, keys), tensors)


def taken_apart(path: Path) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """The metadata and tensors of a file, to be changed and written again by `gguf_bytes`."""
    file = open_gguf(path)
    metadata = {
        key: value.tolist() if isinstance(value, Array) else value
        for key, value in file.metadata.items()
    }
    tensors = {}
    for name in file.tensors:
        kind, shape, data = file.tensor(name)
        tensors[name] = (NUMBERS[kind], shape, bytes(data))
    return metadata, tensors  # type: ignore[return-value]


def float_tensor(*shape: int) -> Tensor:
    """An F32 tensor of ones."""
    return 0, shape, np.ones(shape, np.float32).tobytes()
