"""`make accept NAME=smaller`: a smaller house, with nothing lost and nothing slower.

    python bench/accept/smaller.py [--only steps answers faces status mutants speed table request tests reader ci]
                                   [--base COMMIT or CHECKOUT] [--rounds 5] [--times 3] [--ci]

steps     recorded step logs replay to the same plans and tokens
answers   300 recorded requests get the answers of the base, byte by byte, errors included
faces     --help of all commands, /openapi.json, names of metrics and __all__ are those of the base
status    every row of bench/STATUS.md is there, and its test or command
mutants   the seeded bugs are caught
speed     decode steps, loads, the first streamed token and scheduling, in interleaved pairs with the base
table     rooms and budgets, circles, the shape of the code, as bench/house.py counts them
request   files and lines that a streamed request executes, of both sides, and the rules of the marked path
tests     `make test` beside sixteen busy loops, --times in a row
reader    the page that a new reader starts with
ci        seconds of `make check`, `make test` and `make test-full`, with --ci (of both sides) or as given

The base is installed once in build/base/COMMIT, or --base names a checkout that has its .venv.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import same_answers
import same_faces
import same_speed
import same_steps
import sides
from harness import ROOT, Line, NotRun, Part, busy, main, pytest_line, ran
from sides import Side

# Figures of bench/house.py -> the most that this piece of work wants, of all or for each 1,000 lines.
WANTED = {
    "tokens of src/pageturner": 495_000,
    "tokens of bench": 140_000,
    "tokens of tests": 580_000,
    "files in a folder": 25,
    "import circles": 0,
    "arrows upwards": 0,
    "docstrings without a subject": 0,
    "functions of more than five parameters": 29,
    "names MOST_": 0,
}
WANTED_PER_1000 = {  # half of 12.9, 22 and 68
    "tuple assignments": 6.45,
    "conditional expressions": 11.0,
    "lines over 100 characters": 34.0,
}
MAX_EXECUTED = (70, 12_000)  # files and lines of a streamed request
MAX_PAGE_LINES = 150  # of docs/architecture.md
BUSY_LOOPS = 16
CI = {"check": None, "test": 150.0, "test-full": 1200.0}  # make target -> most seconds of ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default=sides.BASE, help="a commit, or a checkout with its .venv")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs of each speed")
    parser.add_argument("--times", type=int, default=3, help="`make test` in a row")
    parser.add_argument("--ci", action="store_true", help="time make check, test and test-full")
    parser.add_argument("--ci-before", type=float, metavar="SECONDS", help="measured elsewhere")
    parser.add_argument("--ci-after", type=float, metavar="SECONDS")


@functools.cache
def base(options: str) -> Side:
    """The base, installed when the first part needs it."""
    return sides.earlier(options)


def with_base(
    lines: Callable[..., Iterator[Line]],
) -> Callable[[argparse.Namespace], Iterator[Line]]:
    """A part that compares the two sides and knows no options."""
    return lambda options: lines(base(options.base), sides.ours())


def speed(options: argparse.Namespace) -> Iterator[Line]:
    yield from same_speed.lines(base(options.base), sides.ours(), options.rounds)


def status(options: argparse.Namespace) -> Iterator[Line]:
    yield from same_faces.status(base(options.base))


def mutants(_: argparse.Namespace) -> Iterator[Line]:
    yield pytest_line("every seeded bug is caught", "-m", "slow", "tests/mutants")


# -- the table -------------------------------------------------------------------------------------
def table(_: argparse.Namespace) -> Iterator[Line]:
    """The tables of bench/house.py, its bars, and what this piece of work wants."""
    script = str(ROOT / "bench" / "house.py")
    print(ran(sys.executable, script).stdout)
    done = ran(sys.executable, script, "--json")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"bench/house.py: {done.stderr.strip()[-300:]}")
    yield from counted(json.loads(done.stdout))


def counted(found: dict[str, Any]) -> Iterator[Line]:
    """A line for each figure of what bench/house.py prints as JSON."""
    figures, missed = found["figures"], found["missed"]
    kept = len(figures) - len(missed)
    figure = "; ".join(
        [f"{kept} of {len(figures)}", *(f"{one} {figures[one]:,}" for one in missed)]
    )
    yield Line("house: figures within their bars", figure, not missed)
    for name, most in WANTED.items():
        yield Line(f"house: {name}, at most {most:,}", f"{figures[name]:,}", figures[name] <= most)
    lines = sum(row["lines"] for row in found["rooms"])
    for name, share in WANTED_PER_1000.items():
        per_1000 = 1000 * figures[name] / lines
        what = f"house: {name} per 1,000 lines, at most {share:g}"
        yield Line(
            what, f"{per_1000:.2f} ({figures[name]:,} of {lines:,} lines)", per_1000 <= share
        )
    yield Line("house: files with one importer", f"{len(found.get('one importer', ())):,}", None)


def request(options: argparse.Namespace) -> Iterator[Line]:
    """The files and lines that a request executes, and the rules of the marked path."""
    before = same_faces.executed(base(options.base))
    files, code = same_faces.executed(sides.ours())
    most = MAX_EXECUTED
    figure = f"{files} files, {code:,} lines; was {before[0]} files, {before[1]:,} lines"
    what = f"a streamed request executes at most {most[0]} files and {most[1]:,} lines"
    yield Line(what, figure, files <= most[0] and code <= most[1])
    yield pytest_line("the marked path", "tests/arch/test_path.py")


def reader(_: argparse.Namespace) -> Iterator[Line]:
    """The length of the page that a reader starts with; whether it is understood is asked of a reader."""
    length = (ROOT / "docs" / "architecture.md").read_text().count("\n")
    what = f"docs/architecture.md has at most {MAX_PAGE_LINES} lines"
    yield Line(what, f"{length}", length <= MAX_PAGE_LINES)
    raise NotRun("ten questions and three toys are a reader's trial: bench/LOG.md has the last one")


# -- the tests -------------------------------------------------------------------------------------
def tests(options: argparse.Namespace) -> Iterator[Line]:
    """`make test` on a machine that has other things to do."""
    with busy(BUSY_LOOPS):
        for number in range(1, options.times + 1):
            what = f"make test beside {BUSY_LOOPS} busy loops, {number} of {options.times}"
            yield made(sides.ours(), "test", what, None)[1]


def made(side: Side, target: str, what: str, limit: float | None) -> tuple[float, Line]:
    """Seconds of a make target, and a line that fails where the target fails or takes too long."""
    begin = time.monotonic()
    done = ran("make", target, cwd=side.root, env=side.environment())
    seconds = time.monotonic() - begin
    passed = done.returncode == 0 and (limit is None or seconds <= limit)
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))][:5]
    closing = done.stdout.strip().splitlines()[-1:]
    figure = "; ".join([f"{seconds:,.0f} s", *(one.strip("= ") for one in closing), *said])
    return seconds, Line(what, figure, passed)


def ci(options: argparse.Namespace) -> Iterator[Line]:
    """Seconds of CI, measured on both sides or given."""
    before, after = options.ci_before, options.ci_after
    if not options.ci and (before is None or after is None):
        raise NotRun("half an hour or more: --ci measures it, --ci-before and --ci-after give it")
    if options.ci:
        before, after = 0.0, 0.0
        for target, limit in CI.items():
            before += made(base(options.base), target, target, None)[0]
            aim = "" if limit is None else f" within {limit:.0f} s"
            seconds, line = made(sides.ours(), target, f"CI: make {target}{aim}", limit)
            after += seconds
            yield line
    figure = f"{after:,.0f} s, was {before:,.0f} s"
    yield Line("CI: check, test and test-full together", figure, after <= before)


PARTS = {
    "steps": lambda _: same_steps.lines(),
    "answers": with_base(same_answers.lines),
    "faces": with_base(same_faces.outside),
    "status": status,
    "mutants": mutants,
    "speed": speed,
    "table": table,
    "request": request,
    "tests": tests,
    "reader": reader,
    "ci": ci,
}

if __name__ == "__main__":
    parts = {name: Part(lines, add_arguments) for name, lines in PARTS.items()}
    sys.exit(main("smaller", __doc__, parts))
