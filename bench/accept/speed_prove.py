"""`make prove` against ours and two peers: the table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import harness
from harness import Line, NotRun

import prove

# What ours must hold; what the others find depends on the machine and its load.
MUST = {"batch": False, "kill": False, "weights": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prove-seconds", default="540", help="no claim begins later than this")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    if len(prove.standard("smollm2")) < 3:
        raise NotRun("fewer than two peers are installed: bench/peers/setup.sh llama vllm")
    prove.main(["--seconds", options.prove_seconds])
    servers = json.loads((harness.RESULTS / "prove.json").read_text())["servers"]
    for claim, ours in servers["ours"].items():
        cells = [f"{name} {prove.words(one[claim])}" for name, one in servers.items()]
        yield Line(f"prove, {claim}", "; ".join(cells), ours["held"] or MUST.get(claim))


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
