"""`make accept NAME=trust2`: what a second hunt found, and that it is found no more.

    python bench/accept/trust2.py [--only wire stores grammar hunter hostile retry chaos soak] [--long]

wire      HTTP, uploads, refusals, the page
stores    costs paid once, tenants, files, bounds, honest answers
grammar   no grammar holds up anybody's tokens
hunter    5,000 hostile requests made from the API's own document, twice
hostile   every request of bench/hostile_requests.py beside ordinary streams, at three intensities
chaos     answers of all methods while engines and replicas die, in five setups: three minutes, or two hours
retry     does a Retry-After hold on loads that it was not tuned on
soak      requests without end and flat memory: three minutes, or hours
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import harness
from harness import Line, Part

LONG_MINUTES = 120.0  # of chaos
REQUESTS = 150_000  # of the soak
LONG_REQUESTS = 2_000_000  # 46 a second for 12 hours: more than two cores answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--long", action="store_true", help="two hours of chaos, and as much of the soak"
    )


def chaos(options: argparse.Namespace) -> Iterator[Line]:
    import trust2_chaos

    if options.long:
        options.chaos_minutes = LONG_MINUTES
    return trust2_chaos.lines(options)


def chaos_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    harness.part("trust2_chaos").add_arguments(parser)


def retry(_: argparse.Namespace) -> Iterator[Line]:
    words = ("bench/retry_after.py", "--seeds", "1", "--seconds", "200")
    done = harness.ran(sys.executable, *words)
    figure = done.stdout.strip().rpartition("\n")[2]
    yield Line(
        "Retry-After on loads that it was not tuned on: 90 % are let in",
        figure,
        not done.returncode,
    )


def soak(options: argparse.Namespace) -> Iterator[Line]:
    import trust_soak

    return trust_soak.lines(LONG_REQUESTS if options.long else REQUESTS)


PARTS = {name: harness.part(f"trust2_{name}") for name in ("wire", "stores", "grammar", "hunter")}
PARTS |= {
    "hostile": harness.part("trust_hostile"),
    "retry": Part(retry),
    "chaos": Part(chaos, chaos_arguments),
    "soak": Part(soak, add_arguments),
}

if __name__ == "__main__":
    sys.exit(harness.main("trust2", __doc__, PARTS))
