"""`make accept NAME=gpu`: what the GPU backend shows. Without a GPU: kernels compiled, sizes and times.
With one: what bench/gpu/run.py measures. The rest is held by tests/gpu.

    python bench/accept/gpu.py [--only NAME ...]

PAGETURNER_GPU_TOLD may name files that run.py wrote elsewhere, separated by colons: they are judged instead
of running it here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import run_judge
from harness import ROOT, Line, NotRun

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.catalogue import ARCHITECTURES, kernels_of
from pageturner.kernels.gpu.manifest import COMPILED, Manifest

GPU = ROOT / "bench" / "gpu"
MAX_INSTALLED = 60e6  # bytes of the extra and the kernels together
MAX_SECONDS = 0.1
CALLS = (
    ("ceilings", "grid", "right", "bits", "proof", "mixtures", "ranks", "kinds", "forms"),
    ("decode", "prefill", "pdl", "attention", "sampling", "start", "idle", "batch32"),
    ("nano", "burst", "torch", "invariance", "peers", "drafts"),
)


def compiled() -> Iterator[Line]:
    """Every kernel for every architecture, and what each takes."""
    try:
        found = Manifest()
    except EngineFault as fault:
        raise NotRun(fault.message) from None
    told = json.loads((COMPILED / "manifest.json").read_text())
    wanted = sum(len(kernels_of(one)) for one in ARCHITECTURES)
    there = sum(len(set(kernels_of(a)) & set(found.kernels(a))) for a in found.architectures)
    names = ", ".join(map(str, found.architectures))
    portable = "and PTX" if "portable" in told else "and no PTX"
    yield Line(
        "every kernel for six architectures, and PTX",
        f"{there} of {wanted}: sm {names} {portable}",
        there == wanted and "portable" in told,
    )
    yield _fresh(told)
    yield _resources(told)


def _fresh(told: dict[str, Any]) -> Line:
    """Whether they were compiled from the sources as they are."""
    spec = importlib.util.spec_from_file_location("compile_kernels", GPU / "compile_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    same = told["source"] == build.source_hash()
    return Line("compiled from these sources", told["source"][:12], same)


def _resources(told: dict[str, Any]) -> Line:
    """Registers and spills beside what bench/gpu/resources.json has of them."""
    recorded = json.loads((GPU / "resources.json").read_text())
    new, spilt, compared = [], 0, 0
    for architecture, part in told["architectures"].items():
        for name, entry in part["kernels"].items():
            before = recorded.get(architecture, {}).get(name)
            if before is None:
                new.append(f"sm_{architecture} {name} is not recorded")
            elif entry["spills"] > before[1]:
                new.append(
                    f"sm_{architecture} {name} spills {entry['spills']} bytes, {before[1]} before"
                )
            compared += before is not None
            spilt += entry["spills"] > 0
    figure = f"{compared} compared, {spilt} spill"
    return Line(
        "registers and spills: no new spill",
        "; ".join([figure, *new[:3]]),
        not new and compared > 0,
    )


def _size(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def install() -> Iterator[Line]:
    """The extra in a fresh environment: its packages as they lie on disk, and the compiled kernels."""
    what = "pip install .[gpu]: extra and kernels at most 60 MB"
    requirements = _extra()
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True, timeout=120)
        pip = [str(Path(scratch) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        site = next((Path(scratch) / "lib").glob("python*/site-packages"))
        before = _size(site)
        words = (*pip, "install", "--quiet", "--no-compile", *requirements)
        done = harness.ran(*words, timeout=600)
        if done.returncode:
            raise NotRun(f"pip cannot fetch {', '.join(requirements)}: {done.stderr[-300:]}")
        extra = _size(site) - before
        numpy = sum(
            _size(path) for path in site.glob("numpy*")
        )  # which Pageturner needs without a GPU too
    own = _size(COMPILED) if COMPILED.is_dir() else 0
    figure = f"extra {(extra - numpy) / 1e6:.1f} MB, kernels {own / 1e6:.1f} MB"
    if not own:
        yield Line(what, f"{figure}: the kernels are not compiled", None, run=False)
        return
    yield Line(what, figure, extra - numpy + own <= MAX_INSTALLED)


def _extra() -> list[str]:
    """What the extra `gpu` names."""
    found = re.search(r"^gpu = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


_TIMED = """
import time, json
import numpy
begin = time.perf_counter()
from pageturner.kernels.gpu import cuda_driver, ops
imported = time.perf_counter()
from pageturner.errors import EngineFault
from pageturner.kernels.gpu.manifest import Manifest
try:
    found = Manifest()
    found.kernels(found.architectures[-1] if 90 not in found.architectures else 90)
    why = ""
except EngineFault as fault:
    why = fault.message
print(json.dumps([imported - begin, time.perf_counter() - imported, why]))
"""


def imports() -> Iterator[Line]:
    """In fresh processes: what is imported for a GPU behind numpy, and the kernels of one architecture read,
    checked and unpacked. The best of five, since others use this machine. Modules are compiled by the first
    of them, as an installation compiles them, even where bytecode is not wanted."""
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", _TIMED]
    runs = [
        json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True, env=compiled).stdout
        )
        for _ in range(5)
    ]
    took = min(one[0] for one in runs)
    yield Line(
        "imports of the GPU backend: under 100 ms", f"{1e3 * took:.0f} ms", took < MAX_SECONDS
    )
    what, why = "manifest and its checks: under 100 ms", runs[0][2]
    if why:
        yield Line(what, why, None, run=False)
        return
    took = min(one[1] for one in runs)
    yield Line(what, f"{1e3 * took:.0f} ms", took < MAX_SECONDS)


def device() -> Iterator[Line]:
    """Everything that run.py measures; elsewhere measured files are judged if they are named."""
    named = os.environ.get("PAGETURNER_GPU_TOLD", "")
    if named:
        told = [one for path in named.split(":") for one in run_judge.read(Path(path))]
    elif (why := _no_device()) is None:
        told = _measured()
    else:
        for one in run_judge.judge([]):
            yield Line(one.what, f"needs an NVIDIA GPU ({why})", None, run=False)
        return
    for one in run_judge.judge(told):
        yield Line(one.what, one.figure, one.passed, one.run)


def _no_device() -> str | None:
    """Why nothing can be measured here."""
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    try:
        CudaDriver()
    except EngineFault as fault:
        return fault.message.split(":")[0][:100]
    return None


def _measured() -> list[dict[str, Any]]:
    out = harness.RESULTS / "gpu_device.jsonl"
    harness.RESULTS.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    for parts in CALLS:
        subprocess.run(
            [sys.executable, str(GPU / "run.py"), *parts, "--out", str(out)], check=False
        )
    return run_judge.read(out)


CHECKS = {one.__name__: one for one in (compiled, install, imports, device)}

if __name__ == "__main__":
    sys.exit(harness.run("gpu", CHECKS))
