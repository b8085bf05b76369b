"""`make accept NAME=scale`: past one process.

    python bench/accept/scale.py [--only tiers ray ...] [options of parts]

tiers           KV in host memory and on disk: what is found, at what price, after restarts and damage
proxies         what a router adds, beside nginx and smg
ray             Ray Serve
tensor_parallel tensor parallel ranks
simulated       clusters in the simulator
planner         the plan of a cluster against reality

A part is `scale_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("tiers", "proxies", "ray", "tensor_parallel", "simulated", "planner")

if __name__ == "__main__":
    sys.exit(main_of_parts("scale", __doc__, PARTS))
