"""The stub of the CUDA driver library (tests/gpu/stub_cuda.c): compiled, asked, and a manifest for it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "gpu" / "stub_cuda.c"
MEMORY, PINNED, STREAM, EVENT, MODULE, FUNCTION, GRAPH, READY, PEER = range(1, 10)
CONTEXT = 0
_SIZES = {"i32": "u32", "fp32": "f32"}
_PLANE = ("align 64 .b8", "u32", "u32", "u64", "u64")  # parameters of a plane


def build(folder: Path, source: str = "") -> Path:
    """A folder with libcuda.so.1, of another source if one is given. Skips the test where there is no C
    compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is here")
    out = folder / "libcuda.so.1"
    flags = [
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
    ]
    command = [compiler, *flags, "-o", out, "-x", "c", "-"]
    subprocess.run(command, input=source or SOURCE.read_text(), text=True, check=True)
    return folder


class Stub:
    """The library in this process."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        library.stub_refused.restype = library.stub_launch.restype = ctypes.c_char_p
        library.stub_launch.argtypes = [ctypes.c_size_t]
        library.stub_launches.restype = ctypes.c_size_t
        library.stub_calls.restype = library.stub_held.restype = library.stub_waits.restype = (
            ctypes.c_long
        )
        library.stub_besides.restype = ctypes.c_long

    @property
    def refused(self) -> list[str]:
        """Why calls were refused."""
        found: list[str] = self._library.stub_refused().decode().splitlines()
        return found

    def launches(self) -> list[tuple[str, tuple[int, ...], int, int, tuple[int, ...]]]:
        """Of kernels that ran: name, grid, threads, bytes of shared memory, and parameters as bits."""
        found = []
        for i in range(self._library.stub_launches()):
            name, x, y, z, threads, shared, *rest = self._library.stub_launch(i).decode().split()
            bits = tuple(int(one, 16) for one in rest)
            found.append((name, (int(x), int(y), int(z)), int(threads), int(shared), bits))
        return found

    def besides(self) -> int:
        """How many of them were allowed to begin beside the one in front."""
        return int(self._library.stub_besides())

    def fail(self, name: str, nth: int, code: int) -> None:
        """The nth call of this name from now on fails; "kernel": the nth kernel that runs."""
        self._library.stub_fail(name.encode(), ctypes.c_long(nth), code)

    def calls(self, name: str) -> int:
        return int(self._library.stub_calls(name.encode()))

    def waits(self) -> int:
        """How often somebody waited for work that was not done."""
        return int(self._library.stub_waits())

    def held(self) -> dict[int, int]:
        """How many there are of each kind; of CONTEXT how often it is retained."""
        return {kind: int(self._library.stub_held(kind)) for kind in range(PEER + 1)}

    def parameters(self, symbol: str) -> tuple[int, ...]:
        """Bytes of each parameter of a kernel that is loaded, as its code says."""
        count = self._library.stub_parameters(symbol.encode())
        return tuple(self._library.stub_parameter(symbol.encode(), i) for i in range(count))


def ptx(symbol: str, kinds: tuple[str, ...], warps: int = 4, dependent: bool = False) -> str:
    """A kernel that does nothing; dependent: but to wait."""
    types: list[str] = []
    for kind in kinds:
        types += _PLANE if kind.endswith("]") else (_SIZES.get(kind, "u64"),)
    places = (f"{symbol}_param_{i}" + "[128]" * (one in _PLANE[:1]) for i, one in enumerate(types))
    told = ",\n".join(f"\t.param .{one} {place}" for one, place in zip(types, places, strict=True))
    head = ".version 8.0\n.target sm_80\n.address_size 64\n"
    body = "\tgriddepcontrol.wait;\n" * dependent
    return (
        f"{head}.visible .entry {symbol}(\n{told}\n)\n.reqntid {32 * warps}\n{{\n{body}\tret;\n}}\n"
    )


def write_manifest(folder: Path, kernels: dict[str, dict[str, Any]]) -> Path:
    """A manifest of PTX by name: `arguments` as in the catalogue; `shared`, `warps`, `hidden`,
    `dependent` if wanted."""
    listed, raw = {}, b""
    for name, about in kernels.items():
        entry = {"symbol": name, "hidden": 2, "shared": 0, "warps": 4, "dependent": False} | about
        kinds = tuple(kind for _, kind in entry["arguments"]) + ("*i8",) * entry["hidden"]
        code = ptx(name, kinds, entry["warps"], entry["dependent"])
        packed = zlib.compress(entry.pop("code", code).encode())
        digest = hashlib.sha256(packed).hexdigest()[:32]
        listed[name] = entry | {"at": len(raw), "bytes": len(packed), "sha256": digest}
        raw += packed
    (folder / "portable.bin").write_bytes(raw)
    told = {"source": "0123456789abcdef", "architectures": {}}
    told["portable"] = {"file": "portable.bin", "cuda": 12010, "kernels": listed}  # type: ignore[assignment]
    (folder / "manifest.json").write_text(json.dumps(told))
    return folder
