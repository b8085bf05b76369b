"""`make accept NAME=api`: every client works.

    python bench/accept/api.py [options of api_clients.py]

clients   real clients, each in its own environment, run and their output read
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("clients",)

if __name__ == "__main__":
    sys.exit(main_of_parts("api", __doc__, PARTS))
