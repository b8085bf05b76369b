"""What `make wheels` holds a wheel to: a good one passes, and each thing that can be wrong is named."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from pageturner.kernels.gpu import manifest
from wheels import build, contents, gpu

ROOT = Path(__file__).parents[2]
FILES = {"pageturner/__init__.py", "pageturner/http/page/home.html"}
NAME = "pageturner-0.1.0-cp312-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
MODULE = "pageturner/kernels/_native.abi3.so"


def elf(
    machine: int = 62, *, stripped: bool = True, isas: tuple[str, ...] = contents.ISAS["x86_64"]
) -> bytes:
    """The least that is an ELF file: a header, the names of kernels, a table of two sections."""
    names = b"".join(isa.encode() + b"\0" for isa in isas)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<Q", header, 40, 64 + len(names))
    struct.pack_into("<HH", header, 58, 64, 2)
    sections = bytearray(128)
    struct.pack_into("<I", sections, 64 + 4, 11 if stripped else 2)
    return bytes(header) + names + bytes(sections)


def made(
    folder: Path, *, name: str = NAME, module: bytes | None = None, files: set[str] = FILES
) -> Path:
    """A wheel of these files."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as out:
        for file in files:
            out.writestr(file, "")
        out.writestr(contents.tag_of(path).module, elf() if module is None else module)
        out.writestr("pageturner-0.1.0.dist-info/METADATA", "")
        out.mkdir("pageturner")  # as auditwheel leaves them
    return path


def test_a_good_wheel(tmp_path: Path) -> None:
    assert contents.problems(made(tmp_path), FILES) == []
    arm = elf(183, isas=contents.ISAS["aarch64"])
    one = made(tmp_path, name="pageturner-0.1.0-cp311-cp311-manylinux_2_17_aarch64.whl", module=arm)
    assert (
        contents.tag_of(one).module == "pageturner/kernels/_native.cpython-311-aarch64-linux-gnu.so"
    )
    assert contents.problems(one, FILES) == []


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    def wrong(**how: object) -> str:
        return "; ".join(contents.problems(made(tmp_path, **how), FILES))  # type: ignore[arg-type]

    assert wrong(name=NAME.replace("manylinux_2_17_x86_64.manylinux2014", "linux")).startswith(
        "linux_x86_64 is no"
    )
    assert "from Python 3.12 on" in wrong(name=NAME.replace("cp312", "cp311"))
    assert wrong(files={"pageturner/__init__.py"}) == "not in it: pageturner/http/page/home.html"
    source = {*FILES, "pageturner/kernels/native/gemm.cpp"}
    assert wrong(files=source).startswith(
        "in it, and not of the package: pageturner/kernels/native/gemm.cpp"
    )
    assert wrong(module=elf(183)) == f"{MODULE} is for aarch64"
    assert wrong(module=elf(stripped=False)) == f"{MODULE} is not stripped"
    assert wrong(module=elf(isas=("portable", "avx2"))).endswith(
        "avx512vnni, avx512vnni256, avxvnni, amx"
    )
    assert "not an ELF file" in wrong(module=b"#!/bin/sh")


def test_a_wheel_without_kernels_has_a_name_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not named"):
        contents.tag_of(tmp_path / "pageturner-0.1.0-py3-none-any.whl")


def test_the_instruction_sets_are_those_of_the_build() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    compiled = set(re.findall(r"^\s*pt_kernels\((\w+)", text, re.M)) - {"amx_emulated"}
    assert {isa for isas in contents.ISAS.values() for isa in isas} == compiled


def test_a_wheel_has_every_file_of_the_package() -> None:
    files = contents.expected()
    assert "pageturner/cli/__init__.py" in files
    assert any(name.startswith("pageturner/http/page/") and name.endswith(".js") for name in files)
    assert not [name for name in files if name.endswith((".cpp", ".h"))]


def test_pythons_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for says, why in (("3 9 cpython", "3.11 or newer"), ("3 12 pypy", "CPython")):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho {says}\n")
        python.chmod(0o755)
        with pytest.raises(build.Missing, match=why):
            build.version_of(str(python))
    with pytest.raises(build.Missing, match="does not run"):
        build.version_of(str(tmp_path / "absent"))


def test_one_stable_wheel_for_every_later_python(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"a": 11, "b": 13}
    monkeypatch.setattr(build, "version_of", versions.__getitem__)
    assert build.pythons(["a", "b"]) == {11: "a", 12: "b"}


def test_the_other_machine_is_cross_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.cross_settings("x86_64", 11) == ([], {})
    with pytest.raises(build.Missing, match=r"apt-get install g\+\+-aarch64-linux-gnu$"):
        build.cross_settings("aarch64", 11)
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/bin/{name}")
    settings, environment = build.cross_settings("aarch64", 11)
    assert "-Ccmake.define.CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++" in settings
    assert environment["SETUPTOOLS_EXT_SUFFIX"] == ".cpython-311-aarch64-linux-gnu.so"


def test_an_sdist_has_the_sources_and_nothing_that_a_machine_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "expected", lambda: FILES)
    names = [f"src/{name}" for name in FILES] + ["CMakeLists.txt", "LICENSE", "README.md"]

    def of(*files: str) -> list[str]:
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as out:
            for name in files:
                out.addfile(tarfile.TarInfo(f"pageturner-0.1.0/{name}"))
        return contents.sdist_problems(tmp_path / "x.tar.gz")

    assert of(*names) == []
    assert of(*names[1:]) == [f"not in it: {names[0]}"]
    cached = "src/pageturner/__pycache__/cli.cpython-311.pyc"
    assert of(*names, cached) == [f"in it, and made by a machine: {cached}"]


def test_the_gpu_kernels_have_a_wheel_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make gpu-kernels"):
        gpu.build(tmp_path, tmp_path)
    folder = tmp_path / gpu.COMPILED
    folder.mkdir(parents=True)
    for name in ("manifest.json", "sm_90.bin"):
        (folder / name).write_bytes(name.encode() * 10)
    made = gpu.build(tmp_path, tmp_path / "dist")
    before = made.read_bytes()
    assert gpu.build(tmp_path, tmp_path / "dist").read_bytes() == before
    target = tmp_path / "installed"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--target",
        str(target),
        str(made),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert (target / gpu.COMPILED / "sm_90.bin").read_bytes() == b"sm_90.bin" * 10
    assert manifest.COMPILED.as_posix().endswith(gpu.COMPILED.as_posix())
    [about] = metadata.distributions(path=[str(target)])
    assert about.requires[0] == f"pageturner=={about.version}"
