"""Tensors that lie in mapped files: where each is, its bytes, and hints for the system how they are
read.

Must not know file formats, nor what any tensor means.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pageturner.errors import EngineFault

if TYPE_CHECKING:  # opening a file for its tokenizer alone does not load numpy
    import numpy as np
    from numpy.typing import NDArray

Data = mmap.mmap | bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` has the columns last; `offset` is in the file.

    columns  int32: the input that each column multiplies, where columns lie in another order than
             inputs
    rows     the same for outputs
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    columns: NDArray[np.int32] | None = field(default=None, compare=False)
    rows: NDArray[np.int32] | None = field(default=None, compare=False)


def map_file(path: str | os.PathLike[str], too_short: EngineFault, least: int = 1) -> mmap.mmap:
    """A file for reading. Raises `too_short` for one with fewer than `least` bytes, and
    EngineFault('model_unreadable') where it cannot be read."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < least:
                raise too_short
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise EngineFault("model_unreadable", f"cannot read {path}: {error}") from error


class MappedTensors:
    """Tensors by name. Their bytes stay in the page cache; views of them keep the mapping alive.

    tensors  name -> TensorInfo, in file order
    """

    def __init__(self, path: str, tensors: dict[str, TensorInfo], data: dict[str, Data]) -> None:
        """data: of each tensor the file that it lies in."""
        self.path = path
        self.tensors = tensors
        self._data = data

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """(kind, shape, raw bytes) of a tensor, not copied. EngineFault('tensor_missing') if
        absent."""
        info = self.tensors.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{self.path} lacks the tensor {name!r}")
        raw = memoryview(self._data[name])[info.offset : info.offset + info.nbytes]
        return info.kind, info.shape, raw

    def advise(self, names: Iterable[str], *, needed: bool) -> None:
        """Hint that tensors are needed soon and should be read ahead in the background, or that
        they need not count as this process' memory any more. Unknown names are passed over."""
        advice = getattr(mmap, "MADV_WILLNEED" if needed else "MADV_DONTNEED", None)
        for name in names:
            info, data = self.tensors.get(name), self._data.get(name)
            if (
                advice is None
                or info is None
                or info.nbytes == 0
                or not isinstance(data, mmap.mmap)
            ):
                continue
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError, ValueError):
                data.madvise(advice, start, info.offset + info.nbytes - start)
