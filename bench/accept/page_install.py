"""Installing: the wheels that `make wheels` left in dist/, tried where nothing can compile.

Owns what is asked of them: what they hold and weigh, the README's main job in a fresh environment, the tiny
model by the aarch64 wheel under qemu, and the advice of an installation without kernels, followed literally.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import ROOT, Line, NotRun

from wheels import contents, emulate

READY_SECONDS, INSTALLED_MB = 30.0, 150.0
TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
TOKENS = ROOT / "bench" / "wheels" / "tiny_tokens.py"
NO_COMPILER = "/nonexistent/c++"
QUESTION = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 60,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
}


def bare(bin_folder: Path) -> dict[str, str]:
    """An environment in which this folder is all of PATH."""
    kept = ("HOME", "LANG", "TMPDIR", "PAGETURNER_CACHE", "HF_HOME")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": str(bin_folder),
    }


def call(*command: str | Path, **environment: str) -> str:
    """What a program prints, its warnings too. RuntimeError with its last words if it fails."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))}: {done.stdout[-600:]}"
        )
    return done.stdout


def processor_seconds() -> float:
    """What the processes that were started and have ended took."""
    spent = os.times()
    return spent.children_user + spent.children_system


def make_venv(folder: Path) -> Path:
    """The `bin` of a fresh environment for this Python."""
    call(sys.executable, "-m", "venv", folder, **os.environ)
    return folder / "bin"


def wheels() -> list[Path]:
    """Those of dist/. NotRun if there are none."""
    found = sorted((ROOT / "dist").glob("pageturner-*-manylinux*.whl"))
    if not found:
        raise NotRun("dist/ has no wheels: make wheels")
    return found


def here() -> Path:
    """The wheel for this machine and this Python."""
    minor = sys.version_info.minor
    for wheel in wheels():
        tag = contents.tag_of(wheel)
        fits = tag.python <= minor if tag.stable else tag.python == minor
        if fits and tag.machine == platform.machine():
            return wheel
    raise NotRun(f"dist/ has no wheel for Python 3.{minor} on {platform.machine()}")


def judged() -> Iterator[Line]:
    """What each wheel holds."""
    files = contents.expected()
    for wheel in wheels():
        size = f"{wheel.stat().st_size / 1e6:.1f} MB, {contents.installed_bytes(wheel) / 1e6:.1f} MB unpacked"
        bad = contents.problems(wheel, files)
        yield Line(f"wheel {wheel.name}", "; ".join([size, *bad]), not bad)


def megabytes(bin_folder: Path) -> float:
    """What was installed into an environment, without what every environment has."""
    (site,) = bin_folder.parent.glob("lib/python3.*/site-packages")
    own = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    files = [
        path
        for entry in site.iterdir()
        if not entry.name.startswith(own)
        for path in (entry.rglob("*") if entry.is_dir() else [entry])
    ]
    return sum(path.lstat().st_size for path in files if path.is_file()) / 1e6


def first_answer(url: str) -> str:
    """The first text of the answer to the README's question."""
    asked = harness.request(url, "/v1/chat/completions", QUESTION)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            if text.startswith("{") and (
                said := json.loads(text)["choices"][0]["delta"].get("content")
            ):
                return str(said)
    return ""


def serves(bin_folder: Path, model: str) -> str:
    """Serve, ask, end: the first words."""
    port = harness.free_port()
    command = [
        bin_folder / "pageturner",
        "serve",
        model,
        "--served-model-name",
        "smollm2",
        "--port",
        str(port),
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=bare(bin_folder), stdout=said, stderr=said)
        try:
            harness.wait_ready(f"http://127.0.0.1:{port}", process, 120)
            return first_answer(f"http://127.0.0.1:{port}")
        finally:
            harness.end(process)


def main_job() -> Iterator[Line]:
    """The README's main job from the wheel, in an environment with nothing else on its PATH."""
    wheel = here()
    with tempfile.TemporaryDirectory() as folder:
        bin_folder = make_venv(Path(folder, "venv"))
        house = Path(folder, "house")
        pip = (bin_folder / "python", "-m", "pip")
        call(
            *pip, "download", "--quiet", "--only-binary=:all:", "--dest", house, wheel, **os.environ
        )
        begin, work = time.monotonic(), processor_seconds()
        call(
            *pip,
            "install",
            "--quiet",
            "--no-index",
            "--find-links",
            house,
            wheel,
            **bare(bin_folder),
        )
        installed, work = time.monotonic() - begin, processor_seconds() - work
        doctor = json.loads(
            call(bin_folder / "pageturner", "doctor", "--json", "--no-measure", **bare(bin_folder))
        )
        model = "smollm2" if "model" in doctor else str(TINY)
        begin, before = time.monotonic(), processor_seconds()
        said = serves(bin_folder, model)
        took, work = installed + time.monotonic() - begin, work + processor_seconds() - before
        kernels = doctor["kernels"]
        what = f"without a compiler: installed and {Path(model).name} answered"
        load = os.getloadavg()[0]
        figure = f"{took:.1f} s (installing {installed:.1f}; processor {work:.1f}; load {load:.0f})"
        figure += f", kernels {kernels['isa']}, began {said!r}"
        answered = bool(said) and bool(kernels["native"])
        busy = answered and took >= READY_SECONDS > work and load > (os.cpu_count() or 1)
        figure += "; too busy a machine to tell by the clock" if busy else ""
        yield Line(what, figure, answered and took < READY_SECONDS, run=not busy)
        every = ", ".join(kernels["available"])
        size = megabytes(bin_folder)
        yield Line(
            "installed, model and pip apart",
            f"{size:.0f} MB (usable here: {every})",
            size < INSTALLED_MB,
        )


def emulated() -> Iterator[Line]:
    """The tiny model by the aarch64 wheel, beside the golden tokens and this machine's portable kernels."""
    import numpy as np

    try:
        python = emulate.python()
        fitting = [wheel for wheel in wheels() if emulate.fits(wheel, python)]
        if not fitting:
            raise NotRun(f"dist/ has no aarch64 wheel for {python.name}")
        site = emulate.install(fitting[0], python)
    except emulate.Missing as missing:
        raise NotRun(f"aarch64: {missing}") from None
    golden = np.load(TINY.with_suffix(".npz"))
    prompts, expected = (
        [golden[f"{name}_{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy")
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        arguments = (TOKENS, TINY, file.name)
        own = json.loads(
            call(sys.executable, *arguments, **{**os.environ, "PAGETURNER_ISA": "portable"})
        )
        for isa in contents.ISAS["aarch64"]:
            os.environ["PAGETURNER_ISA"] = isa
            try:
                found = json.loads(emulate.run(python, site, *arguments))
            finally:
                del os.environ["PAGETURNER_ISA"]
            apart = max(
                abs(a - b)
                for x, y in zip(found["logprobs"], own["logprobs"], strict=True)
                for a, b in zip(x, y, strict=True)
            )
            equal = found["tokens"] == expected and found["kernels"] == isa
            figure = f"{sum(map(len, expected))} tokens {'equal' if equal else 'NOT equal'} to Transformers'"
            figure += f"; logprobs at most {apart:.1e} from the portable ones here"
            yield Line(f"aarch64 wheel under qemu, {isa}", figure, equal)


def advice() -> Iterator[Line]:
    """The sdist where nothing compiles, what `doctor` then says, and that done as it is written."""
    archives = sorted((ROOT / "dist").glob("pageturner-*.tar.gz"))
    if not archives:
        raise NotRun("dist/ has no sdist: make wheels")
    with tempfile.TemporaryDirectory() as folder:
        bin_folder = make_venv(Path(folder, "venv"))
        install = (bin_folder / "python", "-m", "pip", "install", "--quiet", archives[-1])
        call(*install, **{**os.environ, "CXX": NO_COMPILER})
        doctor = (bin_folder / "pageturner", "doctor", str(TINY), "--no-measure")
        said = call(*doctor, **bare(bin_folder))
        found = re.search(r"`([^`]* -m pip install [^`]*)`", said)
        advised = found[1] if found else "nothing"
        yield Line(
            "without a compiler: kernels absent, and doctor says what to do",
            advised,
            found is not None,
        )
        if found is None:
            return
        begin = time.monotonic()
        call(*shlex.split(advised), **os.environ)
        chosen = re.search(r"chosen +(.*)", call(*doctor, **bare(bin_folder)))
        now = chosen[1] if chosen else "nothing"
        figure = f"kernels {now}, {time.monotonic() - begin:.0f} s to compile"
        yield Line("the same command, with a compiler there", figure, now.startswith("native"))


PARTS = {"wheels": judged, "main": main_job, "aarch64": emulated, "advice": advice}


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line; what cannot be had here is NOT RUN by itself."""
    for name in arguments.install or PARTS:
        try:
            yield from PARTS[name]()
        except NotRun as reason:
            yield Line(name, str(reason), None, run=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument(
        "--install", nargs="*", choices=PARTS, help="these trials alone (default: all)"
    )
