"""`make accept NAME=house`: nothing lost, nothing slower, and what the house looks like.

    python bench/accept/house.py [--only replay ...]

replay      the step logs of commit 8cc2ebe give the same plans and tokens
"""

from __future__ import annotations

import sys

import harness
from house_replay import replay

if __name__ == "__main__":
    checks: dict[str, harness.Check] = {"replay": replay}
    sys.exit(harness.run("house", checks))
