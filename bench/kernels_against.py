"""The kernels of this tree beside those of another commit, in one run: other, ours, other, ours.

    python bench/kernels_against.py BASE [--rounds 2] [flags of `pageturner bench kernels`]

The ladder of this tree climbs both: the other commit lends its folder `kernels/`, compiled in a temporary
work tree. Of each side and rung the best time counts, since a disturbance only ever adds to it. A rung that
the other commit cannot climb is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pageturner.lab.bench import bench_kernels
from pageturner.lab.reporting import summary

ROOT = Path(__file__).resolve().parents[1]
KERNELS = Path("src/pageturner/kernels")


def build(base: str, folder: Path) -> Path:
    """A copy of our sources with the kernels of `base`, compiled; what is to be on PYTHONPATH."""
    tree = folder / "tree"
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", tree, base], cwd=ROOT, check=True
    )
    try:
        environment = {**os.environ, "PYTHON": sys.executable}
        command = [tree / KERNELS / "native" / "build.sh", folder / "build"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        source = folder / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        mine, theirs = source / "pageturner" / "kernels", tree / KERNELS
        shutil.rmtree(mine)
        shutil.copytree(theirs, mine, ignore=shutil.ignore_patterns("__pycache__"))
        if not (
            mine / "peak.py"
        ).exists():  # limits are taken from our run, but the module is imported
            shutil.copy(ROOT / KERNELS / "peak.py", mine)
        return source
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)


def climb(source: Path, flags: list[str], output: Path) -> dict[str, Any]:
    """One ladder in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pageturner.lab.bench.bench_kernels",
        *flags,
        "--json",
        str(output),
    ]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The ladder of the best time of each rung."""
    rows: dict[tuple[Any, ...], bench_kernels.Row] = {}
    for run in runs:
        for row in run["rungs"]:
            at = bench_kernels.key(row)
            if at not in rows or row["us"] < rows[at]["us"]:
                rows[at] = row
    return {**runs[0], "rungs": list(rows.values())}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a commit, such as HEAD~1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write both ladders to this JSON file")
    args, flags = parser.parse_known_args()
    sides: dict[str, list[dict[str, Any]]] = {"other": [], "ours": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sources = {"other": build(args.base, folder), "ours": ROOT / "src"}
        limits = folder / "limits.json"
        climb(sources["ours"], [*flags, "--only", "elementwise", "--budget", "0"], limits)
        for turn in range(args.rounds):
            for side, runs in sides.items():
                given = [*flags, "--limits", str(limits)]
                runs.append(climb(sources[side], given, folder / f"{side}{turn}.json"))
    ours, other = best_of(sides["ours"]), best_of(sides["other"])
    print(bench_kernels.render(ours, other))
    print(
        f"other: {args.base}, {other['fingerprint']}; best of {args.rounds} runs of each, taken in turns"
    )
    if args.output:
        summary.write_json(args.output, {"ours": ours, "other": other})
    return 0


if __name__ == "__main__":
    sys.exit(main())
