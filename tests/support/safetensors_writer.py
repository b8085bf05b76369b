"""Writes safetensors files. For tests only."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from pageturner.formats.safetensors import open_safetensors

Tensor = tuple[str, tuple[int, ...], bytes]  # type, shape, data


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, data = {}, b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder, to be changed and written again by `write_safetensors`."""
    file = open_safetensors(path)
    return {name: (*file.tensor(name)[:2], bytes(file.tensor(name)[2])) for name in file.tensors}
