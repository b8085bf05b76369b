"""`make accept NAME=house`: the parts of smaller.py that compare, against the commit before the rooms.

python bench/accept/house.py [--only steps answers speed table] [--base COMMIT or CHECKOUT] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys

import smaller
from harness import Part, main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    smaller.add_arguments(parser)
    parser.set_defaults(base="8cc2ebe")


if __name__ == "__main__":
    names = ("steps", "answers", "speed", "table")
    parts = {name: Part(smaller.PARTS[name], add_arguments) for name in names}
    sys.exit(main("house", __doc__, parts))
