"""`make accept NAME=hybrid`: Gemma 4 and models with recurrent layers.

    python bench/accept/hybrid.py [--only gemma ...] [options of parts]

gemma   Gemma 4: logits, tokens and bits of tiny models, folders and GGUF files, quantised; plans; refusals
families  LFM2, Granite 4 H, Nemotron-H, Falcon-H1: logits, tokens, bits, crashes, sizes, refusals
state   recurrent layers in the engine: tiny models beside Transformers, crashes, reuse of prefixes, plans
reuse   what a prompt repeats is found again: beside llama-server, over HTTP
speed   shapes of today's models with random weights beside llama-server and ik_llama.cpp
linear  kernels of recurrent layers: bits, errors, the time of a token beside the plain recurrence

A part is `hybrid_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness import main_of_parts

PARTS = [
    path.stem.removeprefix("hybrid_") for path in sorted(Path(__file__).parent.glob("hybrid_*.py"))
]

if __name__ == "__main__":
    sys.exit(main_of_parts("hybrid", __doc__, PARTS))
