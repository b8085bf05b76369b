"""`make accept NAME=scale`: past one process.

    python bench/accept/scale.py [--only ray tensor_parallel] [options of parts]

ray             Ray Serve
tensor_parallel tensor parallel ranks

A part is `scale_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("ray", "tensor_parallel")

if __name__ == "__main__":
    sys.exit(main_of_parts("scale", __doc__, PARTS))
