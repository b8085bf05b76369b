"""Acceptance in parts: one script names them, each is a file of its own that also runs alone.

A part of SCRIPT.py is `SCRIPT_PART.py` beside it: `lines(arguments)` yields its lines,
`add_arguments(parser)`, where there is one, names its options. An option goes to every part that knows it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import harness
from harness import Line, NotRun


def part(script: str, name: str) -> ModuleType | None:
    """The module of a part; None where there is none."""
    module = f"{script}_{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None


def options(module: ModuleType | None, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is said to a part, and what it does not know."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if (add_arguments := getattr(module, "add_arguments", None)) is not None:
        add_arguments(parser)
    return parser.parse_known_args(given)


def check(
    name: str, module: ModuleType | None, arguments: argparse.Namespace
) -> Callable[[], Iterator[Line]]:
    """The lines of a part, as the harness wants them."""

    def lines() -> Iterator[Line]:
        if module is None:
            raise NotRun("part absent")
        yield from module.lines(arguments)

    lines.__name__ = name
    return lines


def main(script: str, names: Sequence[str], about: str | None) -> int:
    """Run the parts that the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"make accept NAME={script}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="*", choices=names, default=names, help="run these parts alone"
    )
    chosen, given = parser.parse_known_args()
    checks, unknown = {}, given
    for name in chosen.only:
        module = part(script, name)
        arguments, left = options(module, given)
        unknown = [word for word in unknown if word in left]
        checks[name] = check(name, module, arguments)
    if unknown:
        parser.error(f"no part knows {' '.join(unknown)}")
    sys.argv[1:] = []
    return harness.run(script, checks)
