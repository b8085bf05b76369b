"""The first hour of a new user: the start, the page, flags, commands, what is published, the docs."""

from __future__ import annotations

import sys

import harness

PARTS = ("start", "page", "flags", "commands", "published", "docs")

if __name__ == "__main__":
    sys.exit(harness.main_of_parts("hour", __doc__, PARTS))
