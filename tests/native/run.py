"""Builds the test programs of the kernels and runs them: here, cross compiled for ARM under an emulator,
under sanitizers; counts instructions of fixed pieces of work and compares them with those recorded.

    python tests/native/run.py [native|emulated|sanitized|bound|instructions ...] [--record]

Without a word: all of them, as `make soak` does. `--record` writes instructions.json. The exit status is 1
if anything failed or if a tool is missing, which is named with its Debian package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.03
PACKAGES = {
    "g++": "g++",
    "cmake": "cmake",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "qemu-x86_64": "qemu-user",
    "valgrind": "valgrind",
}
ARM = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
)
BY_VALGRIND = ("avx2", "portable")  # valgrind stops at AVX2; the others run step by step


BOUND = ("tests/kernels", "tests/models/test_lora.py", "tests/engine/test_kv_survival.py")


class Missing(Exception):
    """A program that is not installed."""


def need(*programs: str) -> None:
    """Missing, with the names of Debian packages, unless all of them are installed."""
    absent = [p for p in programs if not shutil.which(p)]
    if absent:
        packages = " ".join(sorted({PACKAGES[p] for p in absent}))
        raise Missing(f"{', '.join(absent)} not found: apt-get install {packages}")


def build(name: str, *options: str) -> Path:
    """The folder of the programs, built with these options of cmake."""
    need("cmake")
    folder = ROOT / "build" / f"programs-{name}"
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake",
        *ninja,
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-DPAGETURNER_NATIVE_TEST=ON",
        *options,
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def check(title: str, command: Sequence[str | Path]) -> bool:
    """Runs a test program, prints its failures and its last line."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    bad = [line for line in lines if not line.endswith((" ok", " equal"))]
    print(f"{title}: {len(lines) - len(bad)} checks passed; " + "\n".join(bad[-20:]), flush=True)
    if done.returncode:
        print(done.stderr[-4000:])
    return done.returncode == 0


def native() -> bool:
    """Every instruction set of this CPU."""
    need("g++")
    folder = build("native")
    good = check("native", [folder / "kernels_test"])
    return check("ranks", [folder / "ranks_test"]) and good


def emulated() -> bool:
    """ARM cross compiled, and AVX2 as an emulator understands it."""
    need("g++", "aarch64-linux-gnu-g++", "qemu-aarch64", "qemu-x86_64")
    arm = check("aarch64 under qemu", ["qemu-aarch64", build("arm", *ARM) / "kernels_test"])
    x86 = ["qemu-x86_64", "-cpu", "max", build("native") / "kernels_test", "avx2", "portable"]
    return check("x86-64 under qemu", x86) and arm


def sanitized() -> bool:
    """Address and undefined behaviour, then data races."""
    need("g++")
    good = True
    for kinds in ("address,undefined", "thread"):
        options = (f"-DPAGETURNER_SANITIZE={kinds}", "-DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all")
        folder = build(kinds.replace(",", "-"), *options)
        good &= check(f"under -fsanitize={kinds}", [folder / "kernels_test"])
        good &= check(f"ranks under -fsanitize={kinds}", [folder / "ranks_test"])
    return good


def bound() -> bool:
    """Address and undefined behaviour through the binding: the tests of kernels and of KV files."""
    need("g++")
    folder = build(
        "bound",
        "-DPAGETURNER_NATIVE_TEST=OFF",
        "-DPAGETURNER_ISAS=all",
        "-DPAGETURNER_SANITIZE=address,undefined",
        "-DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True
        )
        for name in ("asan", "ubsan")
    ]
    preload = " ".join(done.stdout.strip() for done in libraries)
    # leaks are Python's own; a test asks numpy for more memory than there is
    asan = "detect_leaks=0:allocator_may_return_null=1"
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": asan}
    program = [
        sys.executable,
        "tests/native/sanitized_module.py",
        str(next(folder.glob("_native*.so"))),
    ]
    command = [*program, "-q", "-s", "-p", "no:cacheprovider", *BOUND]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-300:]]
    print(f"the binding under -fsanitize=address,undefined: {last[0]}", flush=True)
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-3000:])
    return done.returncode == 0


def count(program: Path, isa: str, case: str) -> int:
    """Instructions of one piece of work."""
    if isa not in BY_VALGRIND:
        done = subprocess.run([program, isa, case, "step"], capture_output=True, text=True)
        if done.returncode:
            raise Missing("tracing of processes (ptrace) is not allowed here")
        return int(done.stdout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        options = ["--tool=callgrind", "--toggle-collect=measured", f"--callgrind-out-file={out}"]
        subprocess.run(["valgrind", *options, program, isa, case], check=True, capture_output=True)
        found = re.search(r"^totals: (\d+)", out.read_text(), re.MULTILINE)
        assert found is not None, "callgrind counted nothing"
        return int(found[1])


def count_all() -> tuple[str, dict[str, dict[str, int]]]:
    """The compiler, and the counts of every case on every instruction set that can run here."""
    need("g++", "valgrind")
    folder = build("native")
    program = folder / "kernels_count"
    compiler, *cases = subprocess.run(
        [program], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    isas = subprocess.run(
        [folder / "kernels_test", "--list"], check=True, capture_output=True, text=True
    )
    here = [isa for isa in isas.stdout.split() if isa != "amx_emulated"]  # whose pace is no matter
    found = {isa: {case: count(program, isa, case) for case in cases if case} for isa in here}
    return compiler, found


def compare(now: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """A line for each count that is further than TOLERANCE from the recorded one, or has none."""
    lines = []
    for isa, cases in now.items():
        for case, n in cases.items():
            before = recorded.get(isa, {}).get(case)
            if before is None:
                lines.append(f"{isa} {case}: {n} instructions, none recorded")
            elif abs(n - before) > TOLERANCE * before:
                lines.append(
                    f"{isa} {case}: {n} instructions, recorded {before} ({n / before - 1:+.1%})"
                )
    return lines


def instructions(record: bool) -> bool:
    """Counts against instructions.json, which holds for one compiler."""
    compiler, now = count_all()
    if record:
        known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        kept = known.get("counts", {}) if known.get("compiler") == compiler else {}
        text = json.dumps(
            {"compiler": compiler, "counts": {**kept, **now}}, indent=1, sort_keys=True
        )
        RECORDED.write_text(text + "\n")
        print(f"recorded {sum(map(len, now.values()))} counts of GCC {compiler}")
        return True
    recorded = json.loads(RECORDED.read_text())
    if recorded["compiler"] != compiler:
        print(
            f"instructions: NOT COMPARED, recorded with GCC {recorded['compiler']}, this is {compiler}"
        )
        return True
    lines = compare(now, recorded["counts"])
    print(
        f"instructions: {sum(map(len, now.values()))} counts, {len(lines)} off by more than {TOLERANCE:.0%}"
    )
    print("\n".join([*lines, *(["if they are meant to be: --record"] if lines else [])]))
    return not lines


def main() -> int:
    parts: dict[str, Callable[[], bool]] = {
        "native": native,
        "emulated": emulated,
        "sanitized": sanitized,
        "bound": bound,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}, instructions"
    )
    parser.add_argument("--record", action="store_true", help="write the counts of instructions")
    args = parser.parse_args()
    parts["instructions"] = lambda: instructions(args.record)
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    os.nice(5)
    failed = []
    for name in args.parts or parts:
        try:
            good = parts[name]()
        except (Missing, subprocess.CalledProcessError) as e:
            print(f"{name}: NOT RUN: {e}")
            good = False
        if not good:
            failed.append(name)
    print(f"FAILED: {', '.join(failed)}" if failed else "all parts passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
