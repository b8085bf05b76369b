"""`make accept NAME=house`: nothing lost, nothing slower, and what the house looks like.

    python bench/accept/house.py [--only replay http acceptance speed house ci] [--base PATH] [--rounds 5]
                                 [--ci | --ci-before SECONDS --ci-after SECONDS]

replay      the step logs of commit 8cc2ebe give the same plans and tokens
http        300 requests get the answers of commit 8cc2ebe, byte by byte, errors included
acceptance  the lines of talk, models, decoding and lab that are about right answers
speed       decode steps, loads and scheduling in pairs with commit 8cc2ebe; what stop strings cost
house       rooms, lines, private accesses, names that occur twice, as bench/house.py counts them
ci          `make check`, `make test` and `make test-full` on this machine, with --ci; or times given

The commit is installed once in build/house/8cc2ebe, or --base names a checkout that has its .venv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import house_base
import house_http
import house_others
import house_speed
from harness import Check, Line, run
from house_base import Side
from house_replay import replay


def parsed() -> argparse.Namespace:
    """The options of this script; what is left in sys.argv is for the harness."""
    parser = argparse.ArgumentParser(
        prog="make accept NAME=house",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--only PART ...: these parts alone",
    )
    parser.add_argument("--base", type=Path, help="a checkout of 8cc2ebe with its .venv")
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved pairs of each measure of speed"
    )
    parser.add_argument(
        "--ci", action="store_true", help="time check, test and test-full of both sides"
    )
    parser.add_argument(
        "--ci-before", type=float, metavar="SECONDS", help="of all of it, measured elsewhere"
    )
    parser.add_argument("--ci-after", type=float, metavar="SECONDS")
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return options


def checks(options: argparse.Namespace) -> dict[str, Check]:
    """The parts by name. The old commit is looked for when the first part needs it."""

    def sides() -> tuple[Side, Side]:
        return house_base.base(options.base), house_base.ours()

    def http() -> Iterator[Line]:
        yield from house_http.lines(*sides())

    def speed() -> Iterator[Line]:
        yield from house_speed.lines(*sides(), options.rounds)

    def ci() -> Iterator[Line]:
        times = (options.ci_before, options.ci_after)
        yield from house_others.ci(sides if options.ci else None, *times)

    return {
        "replay": replay,
        "http": http,
        "acceptance": house_others.acceptance,
        "speed": speed,
        "house": house_others.house,
        "ci": ci,
    }


if __name__ == "__main__":
    sys.exit(run("house", checks(parsed())))
