"""`make accept NAME=api`: every client works.

    python bench/accept/api.py [--only clients shapes ...] [options of parts]

clients   real clients, each in its own environment, run and their output read
shapes    the smaller shapes on real models: scores, rows, gaps, chat templates, messages that go on
door      Schemathesis on the OpenAPI document; what is refused before anything is read
sessions  an agent's trace finds its KV again; who never releases starves nobody
batches   the journal killed at random: nothing twice, nothing lost; interactive requests beside a batch

A part is `api_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("clients", "shapes", "door", "sessions", "batches")

if __name__ == "__main__":
    sys.exit(main_of_parts("api", __doc__, PARTS))
