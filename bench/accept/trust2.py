"""`make accept NAME=trust2`: what a second hunt found, and that it is found no more.

    python bench/accept/trust2.py [--only wire stores grammar hunter chaos soak] [--long]

wire      HTTP, uploads, refusals, the page
stores    costs paid once, tenants, files, bounds, honest answers
grammar   no grammar holds up anybody's tokens
hunter    5,000 hostile requests made from the API's own document, twice
chaos     answers of all methods while engines die: three minutes, or two hours
soak      requests without end and flat memory: three minutes, or hours
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import harness
from harness import Line, Part

MINUTES, LONG_MINUTES = 3.0, 120.0
REQUESTS, LONG_REQUESTS = 150_000, 6_000_000  # of the soak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--long", action="store_true", help="two hours of chaos, and as much of the soak"
    )


def chaos(options: argparse.Namespace) -> Iterator[Line]:
    import trust_chaos

    minutes = LONG_MINUTES if options.long else MINUTES
    return trust_chaos.lines(minutes, faults=round(4 * minutes))


def soak(options: argparse.Namespace) -> Iterator[Line]:
    import trust_soak

    return trust_soak.lines(LONG_REQUESTS if options.long else REQUESTS)


PARTS = {name: harness.part(f"trust2_{name}") for name in ("wire", "stores", "grammar", "hunter")}
PARTS |= {check.__name__: Part(check, add_arguments) for check in (chaos, soak)}

if __name__ == "__main__":
    sys.exit(harness.main("trust2", __doc__, PARTS))
