"""Shares of the floor of SmolLM2's steps: how near the machine's limits its kernels are.

Owns the targets and what counts as a share: of the least time that a step's operations and bytes need by
the limits of this machine, measured in the same run (bench/steps.py), the share of the time that it took. A
single sequence is all bytes: its share is of the rate at which memory is read. One thread by default, which
is timed by processor time, so that other programs hardly count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from harness import Line

import steps

TARGETS = {"prefill 512": 0.65, "decode 8": 0.50, "decode 32": 0.62, "decode 64": 0.62}
DRAM = 0.78  # of its rate, at one sequence
CONTEXT = 250


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--floor-model", default="smollm2")
    parser.add_argument("--floor-threads", type=int, default=1, help="1: by processor time")


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """A line for each size of step."""
    given = argparse.Namespace(
        model=arguments.floor_model,
        threads=arguments.floor_threads,
        prefill=[512],
        batch=[1, 8, 32, 64],
        context=CONTEXT,
        sampled=False,
        operators=True,
    )
    figures = steps.measure(given)
    limits = figures["limits"]
    for served, apart in zip(figures["served"], figures["apart"], strict=True):
        what = served["what"].removesuffix(f" x {CONTEXT}")
        least, took = sum(apart["floors_us"].values()), served["us"]
        if what == "decode 1":
            rate = (figures["read_bytes"] + _kv_bytes(apart)) / (1e3 * took)
            share, target = rate / limits["read_gb_s"]["256M"], DRAM
            figure = f"{share:.0%} of memory: {rate:.1f} of {limits['read_gb_s']['256M']:.1f} GB/s, {took:,.0f} us"
        else:
            share, target = least / took, TARGETS[what]
            figure = f"{share:.0%} of the floor: {least:,.0f} of {took:,.0f} us"
        target_said = f"at least {target:.0%}, threads {figures['threads']}"
        yield Line(f"{arguments.floor_model}, {what} ({target_said})", figure, share >= target)
    said = f"{limits['integer_gop_s']:,.0f} GOP/s of int8, {limits['fp32_gop_s']:,.0f} GFLOP/s"
    yield Line("limits of this machine", f"{said}; {figures['fingerprint']}", None)


def _kv_bytes(run: dict[str, Any]) -> float:
    """What attention reads in a step."""
    found: float = run["operators"]["attention"]["nbytes"]
    return found
