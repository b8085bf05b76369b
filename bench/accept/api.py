"""`make accept NAME=api`: every client works.

    python bench/accept/api.py [--only clients tools streams shapes ...] [options of parts]

clients   real clients, each in its own environment, run and their output read
agents    Codex, Claude Code and opencode, as they are and with dictated answers
tools     calls in eight formats on real templates: valid, streamed as whole, none lost; Transformers' parse
streams   random requests in each dialect: streamed as whole
shapes    the smaller shapes on real models: scores, rows, gaps, chat templates, messages that go on
door      Schemathesis on the OpenAPI document; what is refused before anything is read
sessions  an agent's trace finds its KV again; who never releases starves nobody
batches   the journal killed at random: nothing twice, nothing lost; interactive requests beside a batch
crash     kill -9 of the engine under mixed streams of all dialects

A part is `api_NAME.py` beside this file (see parts.py).
"""

from __future__ import annotations

import sys

import parts

PARTS = ("clients", "agents", "tools", "streams", "shapes", "door", "sessions", "batches", "crash")

if __name__ == "__main__":
    sys.exit(parts.main("api", PARTS, __doc__))
