"""`make accept NAME=scale`: past one process.

    python bench/accept/scale.py [--only tiers events ...] [options of parts]

tiers           KV in host memory and on disk: what is found, at what price, after restarts and damage
events          KV events for others' routers: an indexer that knows what the cache holds, what steps pay
disaggregation  prefill elsewhere: bits, links that are cut, engines that are killed
mixed           the same beside chunked prefill on both engines, measured and simulated
router          streams that move between replicas
proxies         what a router adds, beside nginx and smg
ray             Ray Serve
tensor_parallel tensor parallel ranks
simulated       clusters in the simulator
planner         the plan of a cluster against reality
bad             bad input: peers that do not fit or mean harm, disks and files that cannot be used

A part is `scale_NAME.py` beside this file (see parts.py).
"""

from __future__ import annotations

import sys

import parts

PARTS = (
    "tiers",
    "events",
    "disaggregation",
    "mixed",
    "router",
    "proxies",
    "ray",
    "tensor_parallel",
    "simulated",
    "planner",
    "bad",
)

if __name__ == "__main__":
    sys.exit(parts.main("scale", PARTS, __doc__))
