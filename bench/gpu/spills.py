"""Where compiled kernels spill: instructions that go to local memory, in all and within the innermost loops
with matrix instructions. Those outside run once for a segment, a part of K or a tile, and cost little.

    python bench/gpu/spills.py [ARCHITECTURE ...]

Reads what `make gpu-kernels` wrote, with nvdisasm of Triton's package.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import compile_judge as judge

from pageturner.kernels.gpu.manifest import Manifest

MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|UTC\w*MMA|FFMA)")
LOCAL = re.compile(r"\b(LDL|STL)")


def listed(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """Instructions, and where labels stand among them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            found.append(instruction[1])
    return found, labels


def count(cubin: bytes) -> tuple[int, int]:
    """Loads and stores of local memory: in all, and most in an innermost loop with matrix instructions."""
    found, labels = listed(cubin)

    def holds(loop: tuple[int, int], what: re.Pattern[str]) -> int:
        return sum(bool(what.search(one)) for one in found[loop[0] : loop[1] + 1])

    loops = []
    for at, one in enumerate(found):
        # with a condition: without one it is the way back from a wait that stands behind the kernel
        back = re.match(r"(?:@\S+ BRA|BRA\.U)\S*\s.*`\((\.L_x_\d+)\)", one)
        if back and labels.get(back[1], at + 1) <= at and holds((labels[back[1]], at), MATRIX):
            loops.append((labels[back[1]], at))
    inner = [
        one
        for one in loops
        if not any(other != one and one[0] <= other[0] and other[1] <= one[1] for other in loops)
    ]
    return holds((0, len(found)), LOCAL), max((holds(one, LOCAL) for one in inner), default=0)


def work(job: tuple[int, str]) -> tuple[int, str, tuple[int, int]]:
    architecture, name = job
    return architecture, name, count(Manifest().kernels(architecture)[name].code)


def main() -> None:
    wanted = [int(one) for one in sys.argv[1:]] or Manifest().architectures
    recorded = judge.read()
    jobs = [(a, name) for a in wanted for name, row in recorded[str(a)].items() if row[1]]
    with ProcessPoolExecutor() as pool:
        for architecture, name, (every, inner) in pool.map(work, jobs):
            nbytes = recorded[str(architecture)][name][1]
            print(
                f"sm_{architecture} {name}: {nbytes} bytes, {every} instructions, {inner} in the loop"
            )


if __name__ == "__main__":
    main()
