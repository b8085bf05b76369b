"""The kernels of this tree beside those of another commit, in one run: other, ours, other, ours.

    python bench/kernels_against.py BASE [--rounds 2] [flags of `pageturner bench kernels`]

Each side climbs its own ladder. Of each side and rung the best time counts, since a disturbance only ever adds to
it. A rung that only one of them has is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from pageturner.lab.bench import bench_kernels
from pageturner.lab.reporting import summary

sys.path += [str(Path(__file__).parent / "accept")]

import sides


def climb(side: sides.Side, flags: list[str], output: Path) -> dict[str, Any]:
    """One ladder in a process of its own."""
    side.run(*side.command("bench", "kernels", *flags, "--json", str(output)))
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
    both = (sides.earlier(args.base), sides.ours())
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in both}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        limits = folder / "limits.json"
        climb(both[1], [*flags, "--only", "elementwise", "--budget", "0"], limits)
        for turn in range(args.rounds):
            for side in both:
                given = [*flags, "--limits", str(limits)]
                runs[side.name].append(climb(side, given, folder / f"{side.name}{turn}.json"))
    ours, other = best_of(runs["ours"]), best_of(runs["base"])
    print(bench_kernels.render(ours, other))
    print(
        f"other: {args.base}, {other['fingerprint']}; best of {args.rounds} runs of each, taken in turns"
    )
    if args.output:
        summary.write_json(args.output, {"ours": ours, "other": other})
    return 0


if __name__ == "__main__":
    sys.exit(main())
