"""`make accept NAME=bring`: files, templates, clients and models as people bring them.

    python bench/accept/bring.py [--only wire api grammar files templates calls families] [options of parts]

wire       odd framing of HTTP, keep-alive of streams, fresh clients
api        every case of cases/api.jsonl and cases/suites.jsonl, by kind
grammar    foreign suites, and JSON Schema: held, passed over, refused
files      split files, keys that say nothing, quantised forms, tokenizers, windows
templates  public chat templates beside Transformers
calls      formats of calls and thoughts: parsed whole and in pieces, written under grammars, detected
families   logits, bits and GGUF files of the new families

A part is `bring_NAME.py` beside this file, with `lines` and `add_arguments`. What lies outside the
repository is named by variables: PAGETURNER_CASES, PAGETURNER_TEMPLATES, PAGETURNER_SOURCES.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("wire", "api", "grammar", "files", "templates", "calls", "families")

if __name__ == "__main__":
    sys.exit(main_of_parts("bring", __doc__, PARTS))
