"""Compile every kernel of the GPU backend ahead of time, for every architecture, without a GPU.

    python bench/gpu/compile_kernels.py [--out DIR] [--architectures 80,90] [--only PREFIX] [--sample]
        [--check | --record [--accept-spills NAME,NAME]]

Writes sm_NN.bin (the cubins, one behind the other, each compressed), portable.bin (PTX) and manifest.json;
with --check, --only or --sample nothing. Registers, spills and shared memory are held against what is
recorded in bench/gpu/resources.json (`compile_judge.py` says what fails); --record writes them there. Two
heights of a kernel with different matrix instructions, more shared memory than a block may have, and operands
whose registers hold other columns than neighbours fail too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compile_judge as judge

from pageturner.kernels.gpu.catalogue import (
    ARCHITECTURES,
    MANY,
    PORTABLE,
    SHARED,
    Height,
    Kernel,
    kernels_of,
)

ROOM = Path(__file__).parents[2] / "src/pageturner/kernels/gpu"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # before Triton is imported: a third of the bytes


# The products of 16 columns of bf16 by one warp, and by the four of a group
WARP_OR_GROUP = re.compile(
    r"mma\.sync\.aligned\.m16k16\.row\.col\.f32\.bf16\.bf16\.f32"
    r"|wgmma\.mma_async\.sync\.aligned\.m64k16\.f32\.bf16\.bf16"
)


def source_hash() -> str:
    """Of everything that the compiled kernels depend on here."""
    digest = hashlib.sha256()
    for path in [ROOM / "catalogue.py", *sorted((ROOM / "source").glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_one(architecture: int, kernel: Kernel) -> dict[str, Any]:
    """The kernel's cubin and PTX, and what it takes."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = kernel.function.split(".")
    function = getattr(importlib.import_module(f"pageturner.kernels.gpu.source.{module}"), name)
    constants = {
        key: getattr(tl, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[value[6:]])
        if isinstance(value, str) and value.startswith("dtype:")
        else value
        for key, value in kernel.constants.items()
    }
    signature = {one: described(kind) for one, kind in kernel.arguments}
    signature |= dict.fromkeys(constants, "constexpr")
    names = [one for one, _ in kernel.arguments]
    attributes = {(names.index(one),): [["tt.divisibility", 16]] for one in kernel.aligned}
    ordered = {one: signature[one] for one in function.arg_names}
    language = GluonASTSource if function.is_gluon() else ASTSource
    source = language(fn=function, signature=ordered, constexprs=constants, attrs=attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": False}
    target = GPUTarget("cuda", architecture, 32)
    # what `cuda_capability_geq` asks in a kernel; no device need be here, and one that is does not matter
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    done = triton.compile(source, target=target, options=options)
    ptx = done.asm["ptx"]
    cubin = done.asm["cubin"]
    boxes = boxes_of(kernel, done.metadata.tensordesc_meta or ())
    # a plane is a map, two sizes and two strides
    hidden = (
        len(re.findall(r"\.param \.", ptx.partition(")")[0]))
        - len(kernel.arguments)
        - 4 * len(boxes)
    )
    mma = sorted(
        set(
            re.findall(
                r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k\d+\S*|tcgen05\.mma\S*", ptx
            )
        )
    )
    return {
        "name": kernel.name,
        "symbol": done.metadata.name,
        "arguments": [list(pair) for pair in kernel.arguments],
        "hidden": hidden,
        "shared": done.metadata.shared,
        "warps": done.metadata.num_warps,  # with those that fetch
        "dependent": judge.waits(ptx),
        "boxes": boxes,
        "constants": {key: str(value) for key, value in kernel.constants.items()},
        "mma": mma,
        "split_words": judge.split_words(done.asm["ttgir"]),
        "ptx": ptx,
        "cubin": cubin,
        **usage(cubin),
    }


def described(kind: str) -> str:
    """A type of the catalogue in Triton's words. Boxes lie in shared memory as TMA and matrix instructions
    want them."""
    if not kind.endswith("]"):
        return kind
    from triton.experimental.gluon import language as gl

    element, _, sides = kind[:-1].partition("[")
    box = list(map(int, sides.split(",")))
    types = {"bf16": gl.bfloat16, "fp16": gl.float16}
    layout = gl.NVMMASharedLayout.get_default_for(box, types[element])
    return f"tensordesc<{element}{box},{layout!r}>"


# The numbers of Triton's compiler and of CUDA's driver differ for these
HOST_KINDS = {8: 10, 9: 8, 10: 9}


def boxes_of(kernel: Kernel, told: Any) -> list[list[int]]:
    """`manifest.Box` of each plane of a kernel. ValueError where a copy takes another form."""
    planes = sum(kind.endswith("]") for _, kind in kernel.arguments)
    found = []
    for one in told:
        kind = HOST_KINDS.get(one["elem_type"], one["elem_type"])
        found.append([*one["block_size"], kind, one["elem_size"], one["swizzle"]])
    if len(found) != planes or any(len(one) != 5 for one in found):
        raise ValueError(f"{kernel.name}: {planes} planes, and maps {told}")
    return found


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of local memory (spills) of each thread, by cuobjdump of Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {
        "registers": found.get("REG", 0),
        "spills": found.get("STACK", 0) + found.get("LOCAL", 0),
    }


def work(job: tuple[int, str]) -> tuple[int, dict[str, Any]]:
    architecture, name = job
    try:
        return architecture, compile_one(architecture, kernels_of(architecture)[name])
    except Exception as error:
        return architecture, {"name": name, "error": f"{type(error).__name__}: {error}"[-2000:]}


def one_instruction(kernels: dict[str, dict[str, Any]]) -> list[str]:
    """Heights of a product whose matrix instruction differs in kind or in K from that of many rows: its bits
    may. Few rows of weights in groups take that of one warp on sm_90, as attention does; `run.py forms` and
    the proof of a start compare the bits."""

    def kind(entry: dict[str, Any]) -> set[str]:
        found = {re.sub(r"m(64|16)n\d+", r"m\1", one) for one in entry["mma"]}
        return (
            {WARP_OR_GROUP.sub("m16k16 or m64k16", one) for one in found}
            if "GROUP" in entry["constants"]
            else found
        )

    found = []
    for name, entry in kernels.items():
        stem, _, height = name.rpartition(".")
        family, *rest = name.split(".")
        if family.endswith("persistent"):  # the same product as `dense`
            stem, height = f"{family.replace('persistent', 'dense')}.{rest[0]}", MANY
        other = kernels.get(f"{stem}.{MANY}") if height in set(Height) else None
        if other and kind(entry) != kind(other):
            found.append(f"{name}: {sorted(kind(entry))} and {sorted(kind(other))}")
    return found


def cuda_of(ptx: str) -> int:
    """Version of CUDA, as 12080, whose drivers know PTX of this version: 8.5 came with 12.5, 8.6 with 12.7,
    9.0 with 13.0 (release notes of the PTX ISA)."""
    told = re.search(r"\.version (\d+)\.(\d+)", ptx)
    assert told is not None
    major, minor = int(told[1]), int(told[2])
    return 1000 * (major + 4) + 10 * (minor + (major == 8 and minor > 5))


def write(out: Path, found: dict[int, dict[str, dict[str, Any]]]) -> None:
    """The kernels as data."""
    import triton

    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "source": source_hash(),
        "triton": triton.__version__,
        "architectures": {},
    }
    keep = (
        "symbol",
        "arguments",
        "hidden",
        "shared",
        "warps",
        "dependent",
        "constants",
        "registers",
        "spills",
        "boxes",
    )

    def put(name: str, kernels: dict[str, dict[str, Any]], form: str) -> dict[str, Any]:
        listed, at = {}, 0
        with open(out / name, "wb") as file:
            for kernel in sorted(kernels):
                entry = kernels[kernel]
                raw = entry[form] if form == "cubin" else entry[form].encode()
                packed = zlib.compress(raw, 9)
                file.write(packed)
                digest = hashlib.sha256(packed).hexdigest()[:32]
                listed[kernel] = {one: entry[one] for one in keep} | {
                    "at": at,
                    "bytes": len(packed),
                    "sha256": digest,
                }
                at += len(packed)
        return {"file": name, "kernels": listed}

    for architecture, kernels in sorted(found.items()):
        manifest["architectures"][str(architecture)] = put(
            f"sm_{architecture}.bin", kernels, "cubin"
        )
    if PORTABLE in found:
        manifest["portable"] = put("portable.bin", found[PORTABLE], "ptx")
        manifest["portable"]["cuda"] = max(cuda_of(one["ptx"]) for one in found[PORTABLE].values())
    (out / "manifest.json").write_text(
        json.dumps(manifest, separators=(",", ":"), sort_keys=True) + "\n"
    )


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="compile the GPU kernels ahead of time")
    parser.add_argument("--out", type=Path, default=ROOM / "compiled")
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument(
        "--sample", action="store_true", help="one kernel of each sort, the most demanding"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with what is recorded, write nothing"
    )
    parser.add_argument(
        "--record", action="store_true", help="write what was found to resources.json"
    )
    parser.add_argument(
        "--accept-spills", default="", help="kernels that --record may record with more spills"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.check and options.record:
        parser.error("--check compares, --record writes: one of them")
    return options


def compile_all(wanted: list[int], options: argparse.Namespace) -> tuple[dict[int, Any], list[str]]:
    """What was compiled, by architecture and name, and what could not be."""
    jobs = [
        (architecture, name)
        for architecture in wanted
        for name in kernels_of(architecture)
        if name.startswith(options.only) and (not options.sample or judge.is_sample(name))
    ]
    found: dict[int, dict[str, dict[str, Any]]] = {one: {} for one in wanted}
    begin, wrong = time.perf_counter(), []
    with ProcessPoolExecutor(options.processes) as pool:
        for architecture, entry in pool.map(work, jobs, chunksize=4):
            if "error" in entry:
                wrong.append(f"sm_{architecture} {entry['name']}: {entry['error']}")
            else:
                found[architecture][entry["name"]] = entry
    print(f"{sum(map(len, found.values()))} kernels in {time.perf_counter() - begin:.0f} s")
    return found, wrong


def main() -> int:
    options = options_of()
    found, wrong = compile_all([int(one) for one in options.architectures.split(",")], options)
    accepted = set(filter(None, options.accept_spills.split(",")))
    recorded = judge.read()
    for architecture, kernels in found.items():
        wrong += [f"sm_{architecture} two instructions: {one}" for one in one_instruction(kernels)]
        for name, entry in kernels.items():
            wrong += [f"sm_{architecture} {name}: {one}" for one in entry["split_words"]]
        now = {name: judge.row_of(entry) for name, entry in kernels.items()}
        wrong += judge.too_much_shared(architecture, now, SHARED[architecture])
        before = recorded.setdefault(str(architecture), {})
        bad, told = judge.compare(architecture, now, before, options.record, accepted)
        wrong += bad
        for one in told:
            print("CHANGED", one)
        if options.record:
            failed = {one.split()[1].rstrip(":") for one in bad}
            gone = set(before) - set(now) if not (options.only or options.sample) else ()
            for name in gone:
                del before[name]
            before.update({name: row for name, row in now.items() if name not in failed})
    if options.record:
        judge.write(recorded)
    for one in wrong:
        print("WRONG", one, file=sys.stderr)
    if not (options.only or options.sample or options.check):
        write(options.out, found)
        sizes = {path.name: path.stat().st_size for path in sorted(options.out.iterdir())}
        print("bytes", sizes, sum(sizes.values()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
