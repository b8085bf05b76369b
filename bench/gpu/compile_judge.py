"""Registers, spills and shared memory of compiled kernels beside those that are recorded in resources.json.

Owns what fails and what is only told. Must not know Triton: tests read it where that is absent.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESOURCES = Path(__file__).with_name("resources.json")
# Registers are given to a warp in eights, and small changes of a compiler move a kernel by one or two.
# Shared memory grows by whole tiles where a change matters.
REGISTERS, SHARED = 16, 1024
# One of each sort, of those that spill or hold the most: the others compile to less of the same.
SAMPLE = (
    "dense.bf16.m64_wide",
    "groups.4.128.many",
    "groups.5.32.m16",
    "experts.bf16.few",
    "experts.4.32.few",
    "attend.float16.128.few.fp32",
    "attend.fp8_e4m3.128.many.bf16",
    "attend.int8.64.many.bf16",
    "kv_write.fp8_e4m3",
    "rms_norm.bf16",
    "qk_norm_rope_kv_write.fp8_e4m3.256",
    "gated_dense.bf16.many",
    "lora_expand.bf16.bf16",
)

Row = list[int]  # registers, bytes spilled by a thread, bytes of shared memory


def is_sample(name: str) -> bool:
    return name in SAMPLE


def row_of(entry: dict[str, Any]) -> Row:
    return [entry["registers"], entry["spills"], entry["shared"]]


def too_much_shared(architecture: int, now: dict[str, Row], most: int) -> list[str]:
    """Kernels that compile and that no block of the device can run."""
    return [
        f"sm_{architecture} {name}: {row[2]} bytes of shared memory, a block may have {most}"
        for name, row in now.items()
        if row[2] > most
    ]


def split_words(ttgir: str) -> list[str]:
    """Operands of matrix products in Triton's IR of which a register does not hold neighbours along K. Triton
    arranges those so that were loaded in fewer bits. One instruction then sums other columns than that of
    another height whose operand lies in shared memory, and a row has other bits there."""
    found = []
    for line in re.findall(r".*(?:tt\.dot|warp_group_dot|tc_gen5_mma)\w* .*", ttgir):
        for bits, width in re.findall(r"x[a-z]+(\d+)\w*, #ttg\.dot_op<\{[^}]*kWidth = (\d+)", line):
            if int(bits) * int(width) != 32:
                found.append(f"kWidth {width} of operands of {bits} bits, not {32 // int(bits)}")
    return sorted(set(found))


def compare(
    architecture: int, now: dict[str, Row], before: dict[str, Row], record: bool, accepted: set[str]
) -> tuple[list[str], list[str]]:
    """What fails, and what is only told. Spills that grow, or that a new kernel begins with, are recorded
    only if they are accepted by name: nobody is to record them unseen. Registers and shared memory that grow
    beyond the tolerance fail until they are recorded; a kernel that nobody recorded fails as well."""
    wrong, told = [], []
    for name, row in now.items():
        here, old = f"sm_{architecture} {name}:", before.get(name)
        spilt = old[1] if old else 0
        if row[1] > spilt and not (record and name in accepted):
            advice = "; --record --accept-spills names it" if record else ""
            wrong.append(f"{here} {row[1]} bytes spilled, {spilt} before{advice}")
            continue
        if old is None:
            (told if record else wrong).append(f"{here} {row} is not recorded; --record does")
        elif row != old:
            grown = row[0] - old[0] > REGISTERS or row[2] - old[2] > SHARED
            text = f"{here} registers, spills, shared memory {row}, recorded {old}"
            (wrong if grown and not record else told).append(text)
    return wrong, told


_WAIT = "griddepcontrol.wait"
# What may not stand before it: accesses of memory but those of parameters and of the program's own, and what
# leads around the wait
_TOO_EARLY = re.compile(
    r"^(?:@!?%\w+ )?(?!(?:ld\.param|(?:ld|st)\.(?:volatile\.)?shared|cp\.async\.bulk\.prefetch)\b)"
    r"(?:ld|st|atom|red|cp|tex|tld4|suld|sust|multimem|call|bra|brx|ret|exit|trap)[.\s;]|^\$\w+:"
)
_WAY = re.compile(r"^(?:@!?%\w+ )?bra[.\s]|^\$\w+:")
# The way of the first group of warps, which wait, and that of the others, where a kernel has such groups
_GROUPS = re.compile(r"\n\t@%p\d+ bra\s+(\$\w+);\n\tbra\.uni\s+(\$\w+);\n\1:(?=\s+setmaxnreg)")


def waits(ptx: str) -> bool:
    """Whether a kernel may begin beside the one in front of it: it waits for that one. ValueError where it
    does, and reads or writes something before, or where some thread may pass by. Where there are groups of
    warps the first waits, and the others meet it at a barrier before they do anything."""
    body = ptx.partition(".entry")[2].partition("{")[2]
    if _WAIT not in body:
        return False
    if groups := _GROUPS.search(body):
        others = body.partition(f"\n{groups[2]}:")[2].partition("barrier.sync")[0]
        early = [
            line for line in _lines(others) if _TOO_EARLY.search(line) and not _WAY.search(line)
        ]
        if early:
            raise ValueError(f"before other warps meet those that wait: {early[-1]}")
        body = body.replace(groups[0], "\n")
    before = _lines(body.partition(_WAIT)[0])
    wrong = [line for line in before if _TOO_EARLY.search(line)]
    if wrong or before[-1] != ";":
        raise ValueError(f"before it waits for the kernel in front: {(wrong or before)[-1]}")
    return True


def _lines(text: str) -> list[str]:
    return [line.strip(" \t{}") + ";" for line in re.split(r"[;\n]", text)]


def read(path: Path = RESOURCES) -> dict[str, dict[str, Row]]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(recorded: dict[str, dict[str, Row]], path: Path = RESOURCES) -> None:
    """A line for each kernel, so that a change of one is a change of one line."""
    lines = [
        f' "{architecture}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in sorted(rows.items()))
        + "\n }"
        for architecture, rows in sorted(recorded.items(), key=lambda pair: int(pair[0]))
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
