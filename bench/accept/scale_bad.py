"""Bad input past one process: peers that do not fit or mean harm, disks and files that cannot be used.

Owns which tests show what. Each holds the answers of those who did nothing wrong against an engine alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line, pytest_line  # noqa: E402

LINK, TIERS = "tests/engine/test_remote_prefill.py", "tests/engine/test_kv_tiers.py"
SHOWN = {
    "peers of another model, version, type or key are refused by name": (
        LINK,
        "fit or differs or no_key",
    ),
    "a hostile peer at the port, silent peers, changed bytes": (
        LINK,
        "hostile or says_nothing or changed_byte",
    ),
    "a disk that is full, or may only be read": (
        TIERS,
        "full_disk or may_only_be_read or without_the_file",
    ),
    "a file of another build or model, or damaged at random": (
        TIERS,
        "cannot_be_used or damage or flipped",
    ),
    "settings that cannot be": (f"{LINK} {TIERS} tests/engine/test_kv_events.py", "cannot_be"),
    "replicas that send what none should": ("tests/router/test_hostile_replicas.py", ""),
}


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """A line for each kind of bad input."""
    for what, (files, names) in SHOWN.items():
        yield pytest_line(what, *files.split(), *(["-k", names] if names else []))


if __name__ == "__main__":
    sys.exit(harness.alone(lines, lambda parser: None, __doc__))
