"""`make accept NAME=api`: every client works.

    python bench/accept/api.py [--only clients tools streams shapes ...] [options of parts]

clients   real clients, each in its own environment, run and their output read
agents    Codex, Claude Code and opencode, as they are and with dictated answers
tools     calls in eight formats on real templates: valid, streamed as whole, none lost; Transformers' parse
streams   random requests in each dialect: streamed as whole
shapes    the smaller shapes on real models: scores, rows, gaps, chat templates, messages that go on
door      Schemathesis on the OpenAPI document; what is refused before anything is read
sessions  an agent's trace finds its KV again; who never releases starves nobody
batches   the journal killed at random: nothing twice, nothing lost; interactive requests beside a batch
crash     kill -9 of the engine under mixed streams of all dialects

A part is `api_NAME.py` beside this file: `lines(arguments)` yields its lines, `add_arguments(parser)` names
its options. An option goes to every part that knows it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import harness
from harness import Check, Line, NotRun

PARTS = ("clients", "agents", "tools", "streams", "shapes", "door", "sessions", "batches", "crash")


def part(name: str) -> ModuleType | None:
    """The module of a part; None where there is none."""
    try:
        return importlib.import_module(f"api_{name}")
    except ModuleNotFoundError as error:
        if error.name != f"api_{name}":
            raise
        return None


def options(module: ModuleType | None, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is said to a part, and what it does not know."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if (add_arguments := getattr(module, "add_arguments", None)) is not None:
        add_arguments(parser)
    return parser.parse_known_args(given)


def check(name: str, module: ModuleType | None, arguments: argparse.Namespace) -> Check:
    """The lines of a part, as the harness wants them."""

    def lines() -> Iterator[Line]:
        if module is None:
            raise NotRun("part absent")
        yield from module.lines(arguments)

    lines.__name__ = name
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make accept NAME=api", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="run these parts alone")
    chosen, given = parser.parse_known_args()
    checks, unknown = {}, given
    for name in chosen.only:
        module = part(name)
        arguments, left = options(module, given)
        unknown = [word for word in unknown if word in left]
        checks[name] = check(name, module, arguments)
    if unknown:
        parser.error(f"no part knows {' '.join(unknown)}")
    sys.argv[1:] = []
    return harness.run("api", checks)


if __name__ == "__main__":
    sys.exit(main())
