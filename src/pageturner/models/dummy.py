"""Random weights of a configuration, as a file of tensors that is nowhere: to measure without
weights.

Owns the values. Must not know backends. The same seed gives the same weights everywhere.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.errors import bad_setting
from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.hf_config import CONFIG, read_config
from pageturner.formats.mapped import TensorInfo
from pageturner.models.hf_keys import QUANTISED
from pageturner.models.hf_names import hf_layout
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.names import Layout, Part
from pageturner.models.spec import ModelSpec

TILE = (
    1 << 22
) - 3  # random values that all tensors share; a prime number, so that rows of a matrix differ
SMALL = 0.02  # standard deviation of biases
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class DummyFile:
    """Tensors of the names and shapes of a layout. Of a matrix with k inputs the values have mean 0
    and standard deviation 1 / sqrt(k), so that activations keep their size; norms are ones.

    kind  of matrices; vectors are in fp32
    """

    def __init__(self, path: str, layout: Layout, kind: str, seed: int) -> None:
        self.path = path
        self._seed = seed
        self._tile = np.random.default_rng(seed).standard_normal(TILE, np.float32)
        self._parts: dict[str, tuple[str, Part]] = {}
        self._last: tuple[str, memoryview] = ("", memoryview(b""))  # experts share a tensor
        self.tensors: Mapping[str, TensorInfo] = {}
        found: dict[str, TensorInfo] = {}
        for field, part in _named(layout):
            of_kind = "F32" if len(part.shape) == 1 else kind
            nbytes = math.prod(part.shape) * BY_NAME[of_kind].nbytes
            found[part.name] = TensorInfo(part.name, of_kind, part.shape, 0, nbytes)
            self._parts[part.name] = field, part
        self.tensors = found

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """(kind, shape, bytes), made when it is asked for, and kept until another is."""
        if self._last[0] != name:
            self._last = ("", memoryview(b""))
            self._last = (name, self._made(name))
        info = self.tensors[name]
        return info.kind, info.shape, self._last[1]

    def _made(self, name: str) -> memoryview:
        info, (field, part) = self.tensors[name], self._parts[name]
        count = math.prod(info.shape)
        if field.endswith(("norm", "scale", "scales")):
            values = np.full(count, 1.0 - part.plus, np.float32)
            return _bytes(values, info.kind)
        inputs = info.shape[-2] if part.transposed and len(info.shape) > 1 else info.shape[-1]
        deviation = (
            SMALL if len(info.shape) == 1 or field.endswith(("bias", "biases")) else inputs**-0.5
        )
        begin = zlib.crc32(f"{self._seed} {name}".encode()) % TILE
        tile = self._tile[begin : begin + count]
        if begin + count > TILE:
            tile = np.concatenate([tile, self._tile[: min(begin, count - len(tile))]])
        tile = tile * np.float32(deviation)
        raw = np.frombuffer(_bytes(tile, info.kind), f"<u{BY_NAME[info.kind].nbytes}")
        whole = np.empty(count, raw.dtype)
        for at in range(0, count, TILE):
            whole[at : at + TILE] = raw[: count - at]
        return whole.view(np.uint8).data

    def advise(self, names: Iterable[str], *, needed: bool) -> None:
        """Nothing: there is no disk to read ahead from."""


def _bytes(values: Any, kind: str) -> memoryview:
    if kind == "BF16":  # cut off: which values they are does not matter
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif kind == "F16":
        values = values.astype(np.float16)
    return np.ascontiguousarray(values).view(np.uint8).data


def _named(layout: Layout) -> Iterator[tuple[str, Part]]:
    """Every part that lies in a tensor, with its field."""
    for parts in (layout.top, *layout.layers):
        yield from ((field, part) for field, part in parts.items() if part.name)
    for several in layout.several:
        each = [(field, part) for field, parts in several.items() for part in parts]
        yield from ((field, part) for field, part in each if part.name)
        yield from (("norm", Part(part.by, part.shape[1:])) for _, part in each if part.by)


def open_dummy(path: str | os.PathLike[str], seed: int) -> tuple[DummyFile, ModelSpec, Layout]:
    """Open a folder of which only config.json is read; matrices are of its torch_dtype.

    EngineFault('bad_setting') for a GGUF file, and for a configuration of quantised weights; else
    as read_hf_spec.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise bad_setting(
            f"--load-format dummy takes a folder with a {CONFIG}, and {path} is a file"
        )
    config = read_config(folder)
    if any(config.get(key) for key in QUANTISED.split()):
        raise bad_setting(
            f"--load-format dummy makes floats, and {folder / CONFIG} tells of quantised weights"
            ": take that out, and use --quantization int8 or int4"
        )
    spec = read_hf_spec(config, str(folder / CONFIG), folder.name, True)
    layout = hf_layout(spec, lambda name: False)
    return DummyFile(str(folder), layout, _kind(config), seed), spec, layout


def _kind(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, dict) else {}):
        for key in ("torch_dtype", "dtype"):
            with suppress(KeyError, TypeError):
                return _KINDS[values[key]]
    return "BF16"
