"""`make accept NAME=bring`: requests, templates, schemas, clients and models as people bring them.

    python bench/accept/bring.py [--only wire api grammar templates calls families] [options of parts]

wire       the head of a stream behind a long prompt, Java's client, curl, fresh clients
api        every case of cases/api.jsonl and cases/suites.jsonl, by kind
grammar    foreign suites, and JSON Schema: held, passed over, refused
templates  public chat templates beside Transformers
calls      tools on public chat templates, and the names of vLLM's parsers
families   logits, bits and GGUF files of the new families

A part is `bring_NAME.py` beside this file, with `lines` and `add_arguments`. What lies outside the
repository is named by variables: PAGETURNER_CASES, PAGETURNER_TEMPLATES, PAGETURNER_SOURCES.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("wire", "api", "grammar", "templates", "calls", "families")

if __name__ == "__main__":
    sys.exit(main_of_parts("bring", __doc__, PARTS))
