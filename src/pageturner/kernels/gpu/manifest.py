"""The compiled kernels as they are shipped: which there are for a device, and their bytes.

Owns the format that bench/gpu/compile_kernels.py writes. Must not know how a kernel is loaded.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.catalogue import PORTABLE

COMPILED = Path(__file__).parent / "compiled"
EXACT = (
    90,
    100,
)  # compiled for features that no other device has, not even a later one of the same family
_BUILD = "build them with `make gpu-kernels`, or use --device cpu"


class Box(NamedTuple):
    """The box of a plane that a kernel copies at once, as in CUDA's tensor maps.

    kind, swizzle  CUtensorMapDataType and CUtensorMapSwizzle
    nbytes         of an element
    """

    rows: int
    columns: int
    kind: int
    nbytes: int
    swizzle: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel ready to be loaded.

    hidden     arguments behind the others, which are null pointers
    dependent  it waits by itself for what the kernels in front write: it may be launched beside the
               last one
    boxes      of its arguments that are planes, in their order
    """

    symbol: str
    code: bytes
    kinds: tuple[str, ...]
    hidden: int
    shared: int
    threads: int
    dependent: bool
    boxes: tuple[Box, ...] = ()


class Manifest:
    """The kernels in a folder. EngineFault('gpu_kernels') where there are none, or they are
    damaged."""

    def __init__(self, folder: Path = COMPILED) -> None:
        self._folder = folder
        try:
            text = (folder / "manifest.json").read_text()
            self._read: dict[str, Any] = json.loads(text)
            # of all code too, whose hashes it has
            self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            self.source = str(self._read["source"])
        except FileNotFoundError:
            raise EngineFault(
                "gpu_kernels", f"the GPU kernels are not compiled: {_BUILD}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFault(
                "gpu_kernels", f"{folder}/manifest.json is damaged: {_BUILD}"
            ) from error

    @property
    def architectures(self) -> tuple[int, ...]:
        return tuple(sorted(map(int, self._read["architectures"])))

    @property
    def portable_cuda(self) -> int:
        """Version of CUDA (12080 for 12.8) whose drivers compile the portable kernels; 0: there are
        none."""
        return int(self._read.get("portable", {}).get("cuda", 0))

    def choose(self, capability: int) -> tuple[int, bool]:
        """Return for compute capability 9.0 = 90 the architecture whose kernels run there, and
        whether they are compiled by the driver from PTX. EngineFault('gpu_kernels') where none
        do."""
        if capability in self.architectures:
            return capability, False
        family = [
            one
            for one in self.architectures
            if one // 10 == capability // 10 and one <= capability and one not in EXACT
        ]
        if family:
            return max(family), False
        if "portable" in self._read and capability >= PORTABLE:
            return PORTABLE, True
        have = ", ".join(f"{one // 10}.{one % 10}" for one in self.architectures) or "none"
        told = f"this device has compute capability {capability // 10}.{capability % 10}"
        raise EngineFault("gpu_kernels", f"{told}, and there are kernels for {have}: {_BUILD}")

    def kernels(self, architecture: int, portable: bool = False) -> Mapping[str, Compiled]:
        """The kernels of an architecture, each unpacked when it is asked for: a start needs few of
        them. EngineFault('gpu_kernels') for damaged ones."""
        part = (
            self._read["portable"] if portable else self._read["architectures"][str(architecture)]
        )
        try:
            raw = (self._folder / part["file"]).read_bytes()
        except OSError as error:
            raise EngineFault(
                "gpu_kernels", f"{part['file']} cannot be read ({error}): {_BUILD}"
            ) from error
        return _Kernels(part["kernels"], raw)


class _Kernels(Mapping[str, Compiled]):
    """The kernels of an architecture by name."""

    def __init__(self, entries: dict[str, Any], raw: bytes) -> None:
        self._entries, self._raw = entries, raw

    def __getitem__(self, name: str) -> Compiled:
        return _unpack(name, self._entries[name], self._raw)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _unpack(name: str, entry: dict[str, Any], raw: bytes) -> Compiled:
    packed = raw[entry["at"] : entry["at"] + entry["bytes"]]
    if hashlib.sha256(packed).hexdigest()[:32] != entry["sha256"]:
        raise EngineFault("gpu_kernels", f"the GPU kernel {name} is damaged: {_BUILD}")
    return Compiled(
        entry["symbol"],
        zlib.decompress(packed),
        tuple(kind for _, kind in entry["arguments"]),
        entry["hidden"],
        entry["shared"],
        32 * entry["warps"],
        entry["dependent"],
        tuple(Box(*one) for one in entry.get("boxes", ())),
    )
