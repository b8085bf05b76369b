"""`make accept NAME=page`: something to look at, something to install.

    python bench/accept/page.py [--only install watch ...] [options of parts]

install  wheels, and the README's main job without a compiler
watch    vLLM's dashboard, panel by panel

A part is `page_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("install", "watch")

if __name__ == "__main__":
    sys.exit(main_of_parts("page", __doc__, PARTS))
