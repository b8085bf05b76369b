"""The tensors that a quantised checkpoint is made of, as arrays, checked.

Owns the reading of one tensor of a safetensors file with an expected type and shape. Must not know
what any of them means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats import float8
from pageturner.formats.ggml import U8, dequantise
from pageturner.formats.mapped import TensorInfo
from pageturner.kernels.base import F32
from pageturner.models.weights import TensorFile, has_tensor

_TYPES: dict[str, type[np.generic]] = {
    "I16": np.int16,
    "I32": np.int32,
    "U32": np.uint32,
    "U8": np.uint8,
    "I8": np.int8,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
}
_FLOATS = ("F32", "F16", "BF16")
Shape = tuple[int | None, ...]  # None: any
Matrix = TypeVar("Matrix")


class CheckpointTensors:
    """The tensors of a file. What is wrong with one is told with its name.

    used  the names that were asked for
    """

    def __init__(self, file: TensorFile) -> None:
        self.path = file.path
        self.infos: Mapping[str, TensorInfo] = file.tensors
        self.used: set[str] = set()
        self._file = file

    def readers(
        self, ending: str, read: Callable[[str], Matrix], kinds: Collection[str] = ()
    ) -> dict[str, Callable[[], Matrix]]:
        """Readers of matrices, one for each tensor with this ending (and of one of these kinds), by
        the name of the tensor that there would be unquantised. `read` gets the rest of the name."""
        found = [name for name in self.infos if name.endswith(ending)]
        prefixes = [n.removesuffix(ending) for n in found if not kinds or self.kind(n) in kinds]
        return {f"{prefix}.weight": partial(read, prefix) for prefix in prefixes}

    def has(self, name: str) -> bool:
        return name in self.infos

    def has_value(self, name: str) -> bool:
        """Return whether there is such a tensor, and it is no bias of zeros."""
        return has_tensor(self._file, name)

    def kind(self, name: str) -> str:
        """The type of a tensor, "" if it is absent."""
        return self.infos[name].kind if name in self.infos else ""

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def raw(self, name: str, kind: str, shape: Shape) -> NDArray[np.generic]:
        """A tensor of integers or of the bits of 8-bit floats, not copied. EngineFault
        'tensor_missing', 'weight_kind' or 'tensor_shape'."""
        info = self._info(name)
        if info.kind != kind:
            raise EngineFault(
                "weight_kind",
                f"tensor {name!r} is of type {info.kind}; {kind} was expected of such a checkpoint",
            )
        self._check_shape(info, shape)
        return np.frombuffer(self._file.tensor(name)[2], _TYPES[kind]).reshape(info.shape)

    def bytes(self, name: str, kind: str, shape: Shape) -> U8:
        """Return a tensor of a type of one byte, as `raw` does."""
        return self.raw(name, kind, shape).view(np.uint8)

    def floats(self, name: str, shape: Shape) -> F32:
        """A tensor of floats in fp32; of 8-bit exponents too."""
        info = self._info(name)
        self._check_shape(info, shape)
        data = np.frombuffer(self._file.tensor(name)[2], np.uint8)
        if info.kind in _FLOATS:
            return dequantise(info.kind, info.shape, data)
        if info.kind == "F8_E8M0":
            return powers(data).reshape(info.shape)
        if info.kind == "F8_E4M3":
            return float8.VALUES[data].reshape(info.shape)
        raise EngineFault(
            "weight_kind", f"tensor {name!r} is of type {info.kind}; floats were expected"
        )

    def _info(self, name: str) -> TensorInfo:
        self.used.add(name)
        info = self.infos.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{self.path} lacks the tensor {name!r}")
        return info

    def _check_shape(self, info: TensorInfo, shape: Shape) -> None:
        pairs = itertools.zip_longest(info.shape, shape, fillvalue=-1)
        if not all(wanted in (None, size) for size, wanted in pairs) or len(info.shape) != len(
            shape
        ):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise EngineFault(
                "tensor_shape",
                f"tensor {info.name!r} has shape {info.shape}; ({wanted}) was expected"
                " by its quantization_config",
            )
        if 0 in info.shape:
            raise EngineFault("tensor_shape", f"tensor {info.name!r} is empty: {info.shape}")


def powers(e: NDArray[np.uint8]) -> F32:
    """Powers of two from 8-bit exponents, 2^(e - 127); NaN for 255."""
    values = np.ldexp(np.float32(1), e.astype(np.int32) - 127)
    return np.where(e == 255, np.float32(np.nan), values)
