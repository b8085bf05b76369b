"""What is in a wheel, and what must be: files, the compiled module, its machine, its instruction sets.

Owns the judgement of one finished wheel, read as a file: nothing is installed, and no tool is asked. Which
versions of the C library it needs is auditwheel's affair (build.py).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "src/pageturner/"
LEFT_OUT = SOURCES + "kernels/native/"  # sources of the module: in the sdist
# as CMakeLists.txt names them (pt_kernels); on other machines there are no wheels
ISAS = {
    "x86_64": ("portable", "avx2", "avx512vnni", "avx512vnni256", "avxvnni", "amx"),
    "aarch64": ("portable", "neon_dotprod"),
}
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF
SYMBOL_TABLE = 2  # SHT_SYMTAB: what `strip` takes away
NAME = re.compile(
    r"pageturner-(?P<version>[^-]+)-cp3(?P<minor>\d+)-(?P<abi>abi3|cp3\d+)-(?P<platform>[\w.]+)\.whl"
)


@dataclass(frozen=True, slots=True)
class Tag:
    """What a wheel's name promises. `python`: the minor version of the first Python 3 that it is for."""

    python: int
    stable: bool  # for every later Python too
    platform: str

    @property
    def machine(self) -> str:
        """As `uname -m` says it."""
        return next((name for name in ISAS if self.platform.endswith(name)), "unknown")

    @property
    def module(self) -> str:
        """The compiled module's path in the wheel."""
        abi = "abi3" if self.stable else f"cpython-3{self.python}-{self.machine}-linux-gnu"
        return f"pageturner/kernels/_native.{abi}.so"


def tag_of(wheel: Path) -> Tag:
    """What its name says. ValueError for a name that is none of ours."""
    found = NAME.fullmatch(wheel.name)
    if found is None:
        raise ValueError(f"{wheel.name} is not named as a wheel of pageturner with kernels")
    return Tag(int(found["minor"]), found["abi"] == "abi3", found["platform"])


def expected() -> set[str]:
    """The files of the package that git knows, as a wheel names them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", SOURCES]
    listed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return {
        name.removeprefix("src/")
        for name in listed
        if not name.startswith(LEFT_OUT) and (ROOT / name).is_file()
    }


def elf(module: bytes) -> tuple[str, bool]:
    """The machine that an ELF file is for, and whether it is stripped. ValueError for another file."""
    if module[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")
    (machine,) = struct.unpack_from("<H", module, 18)
    (table,) = struct.unpack_from("<Q", module, 40)
    size, count = struct.unpack_from("<HH", module, 58)
    kinds = [struct.unpack_from("<I", module, table + i * size + 4)[0] for i in range(count)]
    return MACHINES.get(machine, f"machine {machine}"), SYMBOL_TABLE not in kinds


def problems(wheel: Path, files: set[str]) -> list[str]:
    """A sentence for each thing that is not as it must be; empty for a good wheel. files: see expected()."""
    tag = tag_of(wheel)
    bad = []
    if not tag.platform.startswith("manylinux"):
        bad.append(f"{tag.platform} is no manylinux tag: it says nothing about other systems")
    if tag.stable and tag.python < 12:
        bad.append("nanobind has a stable ABI from Python 3.12 on")
    with zipfile.ZipFile(wheel) as inside:
        names = {n for n in inside.namelist() if ".dist-info/" not in n and not n.endswith("/")}
        module = inside.read(tag.module) if tag.module in names else b""
    if lost := sorted(files - names):
        bad.append(f"not in it: {', '.join(lost[:5])}")
    if more := sorted(names - files - {tag.module}):
        bad.append(f"in it, and not of the package: {', '.join(more[:5])}")
    return [*bad, *(module_problems(tag, module) if module else [f"not in it: {tag.module}"])]


def module_problems(tag: Tag, module: bytes) -> list[str]:
    """The same of the compiled module."""
    try:
        machine, stripped = elf(module)
    except (ValueError, struct.error) as error:
        return [f"{tag.module}: {error}"]
    bad = [] if machine == tag.machine else [f"{tag.module} is for {machine}"]
    if not stripped:
        bad.append(f"{tag.module} is not stripped")
    lacks = [isa for isa in ISAS.get(tag.machine, ()) if isa.encode() + b"\0" not in module]
    return [*bad, *([f"kernels not compiled: {', '.join(lacks)}"] if lacks else [])]


def sdist_problems(sdist: Path) -> list[str]:
    """A sentence for each thing of an sdist that is not as it must be."""
    with tarfile.open(sdist) as inside:
        names = {name.partition("/")[2] for name in inside.getnames()}
    wanted = {f"src/{name}" for name in expected()} | {"CMakeLists.txt", "LICENSE", "README.md"}
    bad = [f"not in it: {', '.join(sorted(wanted - names)[:5])}"] if wanted - names else []
    if made := sorted(name for name in names if name.endswith((".pyc", ".so"))):
        bad.append(f"in it, and made by a machine: {', '.join(made[:5])}")
    return bad


def installed_bytes(wheel: Path) -> int:
    """What its files take once unpacked."""
    with zipfile.ZipFile(wheel) as inside:
        return sum(entry.file_size for entry in inside.infolist())
