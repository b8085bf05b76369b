"""`pageturner list`: the models that were fetched, with size and last use."""

from __future__ import annotations

import argparse
import json

from pageturner.cli import models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The form."""
    parser.add_argument(
        "--json", action="store_true", help="print a list of objects, sizes in bytes"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print a line for each."""
    kept = models.kept()
    if arguments.json:
        rows = [
            {"name": m.name, "bytes": m.nbytes, "kind": m.kind, "last_used": m.used} for m in kept
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if not kept:
        print("no model was fetched yet: pageturner pull smollm2")
        return 0
    width = max(4, *(len(model.name) for model in kept))
    print(f"{'name':{width}}  {'size':>9}  kind   last used")
    for model in kept:
        print(
            f"{model.name:{width}}  {models.size(model.nbytes):>9}  {model.kind:5}  {models.day(model.used)}"
        )
    return 0
