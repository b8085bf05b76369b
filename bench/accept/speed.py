"""`make accept NAME=speed`: faster without changing a bit.

    python bench/accept/speed.py [--only prove ...] [options of parts]

drafts  drafts by suffixes: tokens a step, pace with and without, 1, 8 and 64 at once
programs  agents as programs and boosted arrivals: orders beside others, simulated
prove   `make prove` against ours and two peers: the table

A part is `speed_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness import main_of_parts

PARTS = [
    path.stem.removeprefix("speed_") for path in sorted(Path(__file__).parent.glob("speed_*.py"))
]

if __name__ == "__main__":
    sys.exit(main_of_parts("speed", __doc__, PARTS))
